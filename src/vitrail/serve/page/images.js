// Pictures as the browser has them: shown small, however large they are, and given up when they have not been looked at
// for a while. The file itself stays where it is.
const SHOWN = 1400, THUMB = 112; // pixels of the longer side
const BITMAPS = 6, LAYERS = 96e6; // kept at most: pictures ready to draw, and bytes of attention

// One after the other: thirty photographs that are decoded at once would fill the memory.
let line = Promise.resolve();
const inLine = (work) => (line = line.then(work, work));

async function measured(file) {
  const address = URL.createObjectURL(file), image = new Image();
  try {
    await new Promise((done, fail) => {
      image.onload = done;
      image.onerror = () => fail(new Error("not shown by this browser"));
      image.src = address;
    });
    if (!image.naturalWidth || !image.naturalHeight) throw new Error("without a size");
    return [image.naturalWidth, image.naturalHeight]; // upright: as EXIF says
  } finally {
    URL.revokeObjectURL(address);
  }
}

function fitted([width, height], most) {
  const scale = Math.min(1, most / Math.max(width, height));
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

// Decoded beside the page's own thread, upright, at most `most` pixels a side; `region` is a part of it, in its pixels.
async function decoded(file, size, most, region = [0, 0, ...size]) {
  const [resizeWidth, resizeHeight] = fitted(region.slice(2), most);
  const options = { imageOrientation: "from-image", resizeWidth, resizeHeight, resizeQuality: "medium" };
  return createImageBitmap(file, ...region, options);
}

function small(bitmap) {
  const canvas = document.createElement("canvas"), side = THUMB, scale = side / Math.min(bitmap.width, bitmap.height);
  const width = bitmap.width * scale, height = bitmap.height * scale, context = canvas.getContext("2d");
  canvas.width = canvas.height = side;
  context.imageSmoothingEnabled = scale < 3; // pixels of a tiny picture stay pixels
  context.drawImage(bitmap, (side - width) / 2, (side - height) / 2, width, height);
  return canvas;
}

let numbered = 0;
function picture(file) {
  const stop = new AbortController();
  return {
    id: ++numbered, file, name: file.name || "picture", state: "waiting", stop, used: 0,
    size: null, thumb: null, bitmap: null, close: null, blind: false,
    answer: null, took: 0, error: null, wait: "",
    about: null, rollout: null, layers: new Map(), refusals: new Map(), lookWait: 0, lookTook: 0,
  };
}

async function open(one) {
  if (one.bitmap || one.blind || one.opening) return one.opening;
  one.opening = inLine(async () => {
    try {
      one.size ??= await measured(one.file);
      if (one.stop.signal.aborted) return;
      one.bitmap = await decoded(one.file, one.size, SHOWN);
      one.thumb ??= small(one.bitmap);
    } catch {
      one.blind = true; // the server may read what the browser does not
    }
  });
  await one.opening;
  one.opening = null;
}

// Of a long strip the part that the network saw is too coarse in what is shown of the whole: it is decoded by itself.
async function opened(one, [left, top, width, height]) {
  if (one.close || !one.bitmap || one.closing) return;
  const scale = one.bitmap.width / one.size[0];
  if (scale > 0.99 || Math.max(width, height) * scale > 400) return;
  one.closing = true;
  try {
    one.close = await decoded(one.file, one.size, SHOWN, [left, top, width, height].map(Math.round));
  } catch {
    // the coarse one is there
  }
  one.closing = false;
}

function forget(one) {
  one.stop.abort(new DOMException("removed", "AbortError"));
  one.bitmap?.close();
  one.close?.close();
  one.bitmap = one.close = null;
  one.layers.clear();
}

// Gives up what was looked at longest ago.
function tidy(pictures, current) {
  const old = pictures.filter((one) => one !== current).sort((a, b) => a.used - b.used);
  let ready = pictures.filter((one) => one.bitmap).length;
  let held = 0;
  for (const one of pictures) for (const layer of one.layers.values()) held += layer.bytes.length;
  for (const one of old) {
    if (ready > BITMAPS && one.bitmap) {
      one.bitmap.close();
      one.close?.close();
      one.bitmap = one.close = null;
      ready--;
    }
    if (held > LAYERS) {
      for (const layer of one.layers.values()) held -= layer.bytes.length;
      one.layers.clear();
    }
  }
  for (const at of [...(current?.layers.keys() ?? [])]) {
    if (held <= LAYERS || current.layers.size === 1) break;
    held -= current.layers.get(at).bytes.length;
    current.layers.delete(at);
  }
}
