// The arithmetic of attention maps, and their drawing. A layer holds bytes [heads, tokens, patches], each row over its
// own largest weight, and those largest weights.
const ROLLOUT = "rollout", MEAN = "mean", TOKEN = -1; // TOKEN: what is read out, instead of a patch

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes;
}

function layerOf(answer) {
  const bytes = bytesOf(answer.maps), heads = answer.heads, patches = answer.grid[0] * answer.grid[1];
  const tokens = bytes.length / (heads * patches);
  const fits = Number.isInteger(tokens) && tokens >= patches && answer.scale.length === heads * tokens;
  if (!fits) throw new Refused(0, "The server's map does not fit its grid.");
  return { bytes, scale: Float32Array.from(answer.scale), heads, tokens, patches, first: tokens - patches, token: answer.class_token };
}

function add(layer, head, row, into, share) {
  const at = head * layer.tokens + row, start = at * layer.patches, unit = (share * layer.scale[at]) / 255;
  for (let patch = 0; patch < layer.patches; patch++) into[patch] += unit * layer.bytes[start + patch];
}

// How much of each patch `query` takes: of one head, or of all on average. Without a class token the answer is read
// from all patches, so that what they take on average stands for it.
function weights(layer, head, query) {
  const into = new Float32Array(layer.patches);
  const heads = head === MEAN ? [...Array(layer.heads).keys()] : [head];
  const rows = query !== TOKEN ? [layer.first + query] : layer.token ? [0] : [...Array(layer.patches).keys()].map((at) => layer.first + at);
  for (const one of heads) for (const row of rows) add(layer, one, row, into, 1 / (heads.length * rows.length));
  return into;
}

// From the least to the most weight, the asking patch itself aside: it would outshine the others.
function range(row, query) {
  let least = Infinity, most = -Infinity;
  for (let at = 0; at < row.length; at++) {
    if (at === query && row.length > 1) continue;
    least = Math.min(least, row[at]);
    most = Math.max(most, row[at]);
  }
  return [least, Math.max(most - least, 1e-12)];
}

const ramp = [[0, 0, 4], [28, 16, 68], [79, 18, 123], [129, 37, 129], [181, 54, 122], [229, 80, 100], [251, 135, 97], [254, 194, 135], [252, 253, 191]];
function colour(value) {
  const place = value * (ramp.length - 1), low = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[low].map((from, at) => from + (ramp[low + 1][at] - from) * (place - low));
}

function paint(target, row, [rows, columns], query, light) {
  const image = new ImageData(columns, rows), [least, span] = range(row, query);
  for (let at = 0; at < row.length; at++) {
    const value = Math.min(Math.max((row[at] - least) / span, 0), 1);
    image.data.set(light ? [0, 0, 0, 240 * (1 - value) ** 1.6] : [...colour(value), 255], 4 * at);
  }
  target.width = columns;
  target.height = rows;
  target.getContext("2d").putImageData(image, 0, 0);
}

// For the readout: the brightest patch, and how few patches hold half of all.
function told(row, query) {
  let best = -1, total = 0;
  for (let at = 0; at < row.length; at++) {
    total += row[at];
    if (at !== query && (best < 0 || row[at] > row[best])) best = at;
  }
  let held = 0, count = 0;
  for (const weight of Float32Array.from(row).sort().reverse()) {
    if (held >= total / 2) break;
    held += weight;
    count++;
  }
  return { best: Math.max(best, 0), half: count };
}

const percent = (share) => (share >= 0.9995 ? "100" : (100 * share).toFixed(share < 0.0995 ? 1 : 0)) + "\u00a0%";
