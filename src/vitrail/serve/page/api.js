// What the server says, and why it does not. Nothing else on the page sends requests.
const PATIENCE = 120000; // ms for an answer; the server has a shorter time-out of its own
const TRIES = 6; // of a request that is told to come later
const access = { token: "" }; // in memory only

class Refused extends Error {
  // status 0: no answer at all. `again` says whether the same request may do better later.
  constructor(status, reason, again = false) {
    super(reason);
    this.status = status;
    this.again = again;
  }
}

const plain = {
  400: "The server could not read this request.",
  401: "The server requires a token: enter it above.",
  403: "The server refuses requests from this page.",
  404: "The server does not know this request.",
  413: "This image is too large for the server.",
  415: "The server cannot read this image.",
  429: "The server is overloaded.",
  500: "The server failed. See its log.",
  503: "The server is not ready.",
  504: "The server took too long.",
};

const sleep = (ms, signal) =>
  new Promise((done, fail) => {
    if (signal?.aborted) return fail(signal.reason);
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), fail(signal.reason)), { once: true });
  });

function wait(response) {
  // Seconds, or a date; a server that names none is asked again after two.
  const said = response.headers.get("Retry-After"), seconds = Number(said);
  const found = said === null ? 2 : Number.isFinite(seconds) ? seconds : (Date.parse(said) - Date.now()) / 1000;
  return Math.min(Math.max(Number.isFinite(found) ? found : 2, 0.5), 60);
}

async function reason(response) {
  let said = {};
  try {
    said = JSON.parse(await response.text()) ?? {};
  } catch {
    // no JSON, or cut off: the status has to do
  }
  const text = [said.reason, said.error, said.detail].find((one) => typeof one === "string" && one);
  return (response.status === 401 ? null : text) ?? plain[response.status] ?? `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}

async function once(path, body, signal) {
  const limit = new AbortController(), stop = () => limit.abort(signal.reason);
  if (signal?.aborted) throw signal.reason;
  signal?.addEventListener("abort", stop, { once: true });
  const late = setTimeout(() => limit.abort(new Refused(0, "The server took more than two minutes.", true)), PATIENCE);
  const headers = access.token ? { Authorization: "Bearer " + access.token } : {};
  const options = { method: body ? "POST" : "GET", body, headers, signal: limit.signal, cache: "no-store" };
  try {
    const response = await fetch(path, { ...options, credentials: "same-origin", referrerPolicy: "no-referrer" });
    if (response.ok) return { answer: await response.json() };
    return { refused: response, text: await reason(response) };
  } catch (error) {
    if (limit.signal.aborted) throw limit.signal.reason;
    if (error instanceof SyntaxError) throw new Refused(0, "The server's answer was cut off.", true);
    throw new Refused(0, "The server does not answer. Is it still running?", true);
  } finally {
    clearTimeout(late);
    signal?.removeEventListener("abort", stop);
  }
}

// The answer as an object, or Refused. `waiting(seconds, text)` is told when the server says to come back later.
async function ask(path, { body, signal, waiting = () => {} } = {}) {
  for (let tried = 1; ; tried++) {
    const { answer, refused, text } = await once(path, body, signal);
    if (!refused) return answer;
    const later = refused.status === 429 || refused.status === 503;
    if (!later || tried >= TRIES) throw new Refused(refused.status, text, later || refused.status >= 500);
    const until = Date.now() + 1000 * wait(refused);
    for (let left = until - Date.now(); left > 0; left = until - Date.now()) {
      waiting(Math.ceil(left / 1000), text);
      await sleep(Math.min(left, 1000), signal);
    }
    waiting(0, text);
  }
}

const form = (file) => {
  const data = new FormData();
  data.append("image", file, file.name);
  return data;
};

// As typed into a shell. curl reads quotes and backslashes of its own inside the shell's.
const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
function curl(name, path) {
  const inner = /^[\w.\-]+$/.test(name) ? "@" + name : '@"' + name.replaceAll("\\", "\\\\").replaceAll('"', '\\"') + '"';
  const field = /^[\w.@\-]+$/.test(inner) ? "image=" + inner : quoted("image=" + inner);
  const key = access.token ? ' -H "Authorization: Bearer $VITRAIL_TOKEN"' : "";
  return `curl${key} -F ${field} ${quoted(location.origin + path)}`;
}
