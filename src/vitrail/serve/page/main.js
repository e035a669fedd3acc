// The page: what is asked, in which order, and what the person does.
const MOST = 200; // pictures
const EAGER = 2.5e6; // bytes of a layer that are fetched along with the rollout
const TOPK = 5;
const pictures = [];
const model = { known: false, name: "", attention: true, limits: {}, options: ["topk"] };
const host = location.host;

// ---- words -----------------------------------------------------------------------------------------------------
let saying = 0;
function say(text, after = 0) {
  clearTimeout(saying);
  saying = setTimeout(() => ($("said").textContent = text), after);
}
function notice(text, again = null) {
  const box = $("notice"), button = box.querySelector("button");
  box.hidden = !text;
  box.querySelector("p").textContent = text;
  button.hidden = !again;
  button.onclick = again;
}
// What is said of a picture: the classes of a classifier, or the text and the bars that the server has for people.
const barsOf = (answer) => answer.top?.map(({ label, probability }) => ({ label, share: probability })) ?? answer.shown?.bars ?? [];
function label({ answer }) {
  if (!answer || answer.top) return answer?.top[0]?.label ?? "";
  if (answer.segments) return answer.shown?.text ?? "";
  return barsOf(answer).slice(0, 3).map((each) => each.label).join(", ") || (answer.shown?.text ?? "");
}
const asked = (shown) => "/predict" + (model.options.includes("topk") ? "?topk=" + TOPK : shown ? "?show=1" : "");

// ---- the server ------------------------------------------------------------------------------------------------
async function meet() {
  try {
    const about = await ask("/model");
    Object.assign(model, about, { known: true });
    introduce();
    offer();
    listClasses();
    $("gate").hidden = true;
  } catch (error) {
    if (error.status === 401) return gate();
    if (error.status === 0) return gone();
    notice(error.message, () => (notice(""), meet()));
  }
  show();
}

function introduce() {
  const classes = Array.isArray(model.labels) ? model.labels.length : (model.classes ?? 0);
  const strong = document.createElement("b");
  const name = model.name.replace(/\.(safetensors|npz|pth|pt|bin)$/, "");
  strong.textContent = name;
  const knows = model.options.includes("topk") ? count(classes, "class", "classes") : model.outputs;
  const rest = classes ? ` knows ${knows}. Give it an image: see what it predicts` : ": give it an image";
  $("model").replaceChildren(strong, rest + (model.attention ? ", and where it looks." : "."));
  document.title = name + " · vitrail";
  const facts = [name, model.network];
  if (model.layers) facts.push(`${count(model.layers, "layer")} of ${count(model.heads, "head")}`);
  if (model.parameters) facts.push((model.parameters / 1e6).toLocaleString("en", { maximumSignificantDigits: 3 }) + " M parameters");
  if (model.image_size) facts.push([...model.image_size].reverse().join(" × ") + " px");
  if (model.grid) facts.push([...model.grid].reverse().join(" × ") + " patches");
  $("foot").textContent = ["vitrail", ...facts, model.device].filter(Boolean).join(" · ");
}

function gate() {
  $("gate").hidden = false;
  document.querySelector("nav").hidden = true; // a link cannot carry a token
  if (document.activeElement === document.body) $("token").focus();
  say("This server requires a token.");
}

// Asked again and again, less and less often, until it is back.
let watching = 0;
function gone(after = 2000) {
  const again = () => (clearTimeout(watching), (watching = 0), back());
  notice("The server does not answer. The page tries again by itself.", again);
  if (!watching) watching = setTimeout(() => ((watching = 0), back(Math.min(after * 1.5, 15000))), after);
}
async function back(after = 2000) {
  try {
    await ask("/health");
  } catch (error) {
    if (error.status === 0) return gone(after);
  }
  notice("");
  if (!model.known) await meet();
  retry((error) => error.status === 0);
}
function retry(which) {
  for (const one of pictures) {
    if (one.error && which(one.error)) Object.assign(one, { state: "waiting", error: null, wait: "" });
    for (const [layer, error] of one.refusals) if (which(error)) one.refusals.delete(layer);
  }
  show();
  pump();
}
function trouble(error) {
  if (error.status === 401) gate();
  if (error.status === 0 && error.again) gone();
}

// ---- answers ---------------------------------------------------------------------------------------------------
let busy = 0;
function pump() {
  while (busy < 2) {
    const next = [view.current, ...pictures].find((one) => one?.state === "waiting");
    if (!next) break;
    busy++;
    next.state = "asking";
    predict(next).finally(() => (busy--, pump()));
  }
  attend();
}

function oversize(file) {
  const most = (model.limits?.max_bytes ?? 0) - 1024; // a request has some bytes beside the file
  const megabytes = (size) => (size / 1e6).toLocaleString("en", { maximumFractionDigits: 1 }) + " MB";
  if (most > 0 && file.size > most) return `The file has ${megabytes(file.size)}; the server takes ${megabytes(most)} at most. Send a smaller one.`;
  return file.size ? "" : "The file is empty: it has no bytes. Choose another one.";
}

async function predict(one) {
  show();
  const large = oversize(one.file), clock = setInterval(show, 1000);
  one.since = performance.now();
  try {
    if (large) throw new Refused(one.file.size ? 413 : 415, large);
    const waiting = (seconds, text) => {
      one.wait = seconds ? `${text} Trying again in ${seconds} s.` : "";
      one.since = performance.now();
      show();
    };
    const said = await ask(asked(true), { body: form(one.file), signal: one.stop.signal, waiting });
    const mine = said.predictions[0];
    if (mine.error) throw new Refused(415, mine.reason ?? mine.error);
    Object.assign(one, { answer: mine, raw: said, took: performance.now() - one.since, state: "done", wait: "" });
    if (one === view.current) say(`${one.name}: ${barsOf(mine).map((each) => `${each.label} ${percent(each.share)}`).join(", ") || label(one)}`);
  } catch (error) {
    if (one.stop.signal.aborted) return;
    await blame(one, error);
  } finally {
    clearInterval(clock);
    show();
  }
}

async function blame(one, error) {
  let found = error instanceof Refused ? error : new Refused(0, "The server's answer is not what this page expects.");
  if (found.status === 0 && found.again) {
    try {
      await one.file.slice(0, 1).arrayBuffer();
    } catch {
      found = new Refused(415, "The file can no longer be read. Was it moved, or is it a folder?");
    }
  }
  Object.assign(one, { state: "failed", error: found, wait: "" });
  if (one === view.current) say(`${one.name}: ${found.message}`);
  trouble(found);
}

// Attention of the picture that is looked at; an older question is given up.
let looking = null;
function attend() {
  const one = view.current;
  if (!one || !model.attention || one.state === "waiting" || one.state === "asking") return;
  if (one.state === "failed" && ![404, 405, 409, 501].includes(one.error.status)) return;
  const layer = wanted(one);
  if (one.refusals.has(layer) || (one.rollout && (layer === null || one.layers.has(layer)))) return;
  const key = one.id + "/" + layer;
  if (looking?.key === key) return;
  looking?.stop.abort(new DOMException("another one is asked for", "AbortError"));
  const mine = (looking = { key, stop: new AbortController() });
  one.stop.signal.addEventListener("abort", () => mine.stop.abort(one.stop.signal.reason), { once: true });
  fetched(one, layer, mine.stop.signal).finally(() => {
    if (looking === mine) looking = null;
    if (mine.stop.signal.aborted) return;
    tidy(pictures, view.current);
    show();
    attend();
  });
}

// The layer to ask for, or null: large ones only when somebody wants to see them.
function wanted(one) {
  const about = one.about ?? model;
  if (!about.grid) return null;
  const patches = about.grid[0] * about.grid[1];
  return view.head !== ROLLOUT || about.heads * patches * (patches + 1) <= EAGER ? depth(about) : null;
}

async function fetched(one, layer, signal) {
  const start = performance.now();
  try {
    await sleep(one.rollout ? 90 : 0, signal); // a slider that is drawn along asks for where it stops
    const path = "/attention" + (layer === null ? "" : "?layer=" + layer);
    const said = await ask(path, { body: form(one.file), signal, waiting: (seconds) => ((one.lookWait = seconds), show()) });
    const { grid, layers, heads, crop, size } = said;
    one.about = { grid, layers, heads, crop, size, token: said.class_token };
    one.rollout = Float32Array.from(said.rollout);
    if (said.maps) one.layers.set(said.layer, layerOf(said));
    one.lookTook = performance.now() - start;
    if (view.query >= grid[0] * grid[1]) Object.assign(view, { query: TOKEN, patch: null });
  } catch (error) {
    if (signal.aborted) return;
    const found = error instanceof Refused ? error : new Refused(0, "The server's map is not what this page expects.");
    one.refusals.set(layer, found);
    trouble(found);
  }
}

// ---- showing ---------------------------------------------------------------------------------------------------
let due = 0;
function show() {
  due ||= requestAnimationFrame(() => ((due = 0), render()));
}
function render() {
  const one = view.current;
  $("welcome").hidden = pictures.length > 0;
  $("work").hidden = !one;
  drawStrip();
  if (!one) return;
  drawStage(one);
  drawAnswer(one);
  drawLook(one);
  drawShell(one);
}

function drawStrip() {
  const box = $("strip");
  $("clear").hidden = pictures.length < 2;
  box.hidden = pictures.length < 2;
  const there = new Map([...box.children].map((item) => [item.dataset.id, item]));
  pictures.forEach((one, at) => {
    const item = there.get(String(one.id)) ?? box.appendChild(thumb(one));
    there.delete(String(one.id));
    if (box.children[at] !== item) box.insertBefore(item, box.children[at]);
    if (one.thumb && item.firstChild !== one.thumb) item.replaceChildren(one.thumb);
    const current = one === view.current;
    item.className = "thumb " + one.state;
    item.tabIndex = current ? 0 : -1;
    item.setAttribute("aria-current", String(current));
    const state = one.answer ? `: ${label(one)}` : one.error ? ": not taken" : "";
    item.setAttribute("aria-label", `${at + 1} of ${pictures.length}, ${one.name}${state}`);
    item.title = one.name + state;
  });
  for (const item of there.values()) item.remove();
}
function thumb(one) {
  const item = document.createElement("button");
  item.type = "button";
  item.dataset.id = one.id;
  item.addEventListener("click", () => choose(one));
  return item;
}

function drawAnswer(one) {
  const box = $("answer"), pending = one.state === "waiting" || one.state === "asking", title = $("answer-title");
  box.setAttribute("aria-busy", String(pending));
  box.classList.toggle("pending", pending);
  $("answer-over").textContent = one.error ? "No answer" : pending ? "It looks" : "It says";
  title.textContent = one.error ? headline(one.error) : pending ? "\u00a0" : label(one);
  title.classList.toggle("bad", Boolean(one.error));
  title.classList.toggle("long", title.textContent.length > 48);
  $("failed").hidden = !one.error;
  $("reason").textContent = one.error?.message ?? "";
  $("again").hidden = !one.error?.again;
  $("top").hidden = Boolean(one.error);
  const key = `${one.id} ${one.state}`;
  if ($("top").dataset.key !== key) $("top").replaceChildren(...(one.error ? [] : (one.answer ? barsOf(one.answer) : Array(TOPK).fill(null)).map(bar)));
  $("top").dataset.key = key;
  drawDrawing(one);
  const since = one.state === "asking" ? Math.floor((performance.now() - one.since) / 1000) : 0;
  $("took").textContent = one.wait || (one.answer ? `Answered in ${one.took.toFixed(0)} ms.` : since > 2 ? `Still waiting, ${since} s.` : "");
}
function drawDrawing(one) {
  const box = $("drawing"), png = one.answer?.shown?.png;
  box.hidden = !png;
  if (!png || box.dataset.id === String(one.id)) return;
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  image.alt = `The prediction, drawn over ${one.name}`;
  box.dataset.id = one.id;
  box.replaceChildren(...(one.answer.segments ? frameSegments(one, image) : [image]));
}
function headline({ status, again }) {
  if (status === 401) return "A token is needed";
  if (status === 409) return "No classes to predict";
  return again ? "Not answered" : "This image was rejected";
}
function bar(each) {
  const item = document.createElement("li"), name = document.createElement("span"), value = document.createElement("span");
  const rail = document.createElement("i"), part = document.createElement("i");
  name.className = "class";
  value.className = "share";
  rail.className = "rail";
  if (each) {
    name.textContent = each.label;
    value.textContent = percent(each.share);
    part.style.width = 100 * each.share + "%";
    part.style.background = each.colour ?? "";
  }
  rail.append(part);
  item.append(name, rail, value);
  return item;
}

function drawLook(one) {
  const about = one.about, none = model.known && !model.attention, wrong = mapOf(one) ? null : one.refusals.get(wanted(one));
  $("look").hidden = Boolean(one.error) && !about;
  $("controls").hidden = !about || none;
  $("frame").hidden = true;
  const line = $("readout"), strong = document.createElement("b");
  line.classList.toggle("bad", Boolean(wrong));
  if (none) line.replaceChildren("This network has no attention to show: it is a convolutional one, without patches that look at each other. Its classes are above.");
  else if (wrong) line.replaceChildren(wrong.message);
  else {
    const [what, rest] = readout(one);
    strong.textContent = what;
    if (what) line.replaceChildren(strong, rest);
    else line.replaceChildren(one.lookWait ? `The server is busy. Trying again in ${one.lookWait} s.` : about ? `Fetching layer ${depth(about) + 1} …` : "Following its attention …");
  }
  $("look").setAttribute("aria-busy", String(!mapOf(one) && !wrong && !none));
  if (!about || none) return;
  drawTiles(one);
  $("layer").max = about.layers;
  $("layer").value = depth(about) + 1;
  $("layer").disabled = about.layers === 1;
  $("layer-said").textContent = `${depth(about) + 1} of ${about.layers}`;
  $("strength").disabled = view.shown === "map";
  $("strength-said").textContent = percent(view.strength);
  $("who-token").textContent = about.token ? "class token" : "all patches";
  check("who", view.query === TOKEN || view.head === ROLLOUT ? "token" : "patch");
  check("shown", view.shown);
  check("frame", framed(one).whole ? "whole" : "seen");
  const [left, top, width, height] = about.crop;
  $("frame").hidden = one.blind || (left <= 0 && top <= 0 && width >= about.size[0] && height >= about.size[1]);
}
const check = (name, value) => (document.querySelector(`input[name=${name}][value=${value}]`).checked = true);

// Files in base64 are longer than anybody reads.
const brief = (_, value) => (typeof value === "string" && value.length > 400 ? `${value.slice(0, 60)}… (${count(value.length, "character")})` : value);
function drawShell(one) {
  const path = "/attention" + (view.head === ROLLOUT || !one.about ? "" : "?layer=" + depth(one.about));
  const lines = [curl(one.name, asked(false))];
  if (model.attention) lines.push(curl(one.name, path));
  $("shell").hidden = Boolean(one.error);
  $("curl").textContent = lines.join("\n");
  $("json").textContent = one.raw ? JSON.stringify(one.raw, brief, 2) : "";
}
