// Segments of an answer: which one is under the pointer, its light on the drawing, and what is said of it.
const MASK_SIDE = 700; // pixels of the longer side of a mask here

// The runs of COCO's text: lengths of zeros and ones in turn, down the columns.
function runsOf(text) {
  const runs = [];
  for (let at = 0; at < text.length; ) {
    let value = 0, shift = 0, part;
    do {
      part = text.charCodeAt(at++) - 48;
      value += (part & 31) * 2 ** shift;
      shift += 5;
    } while (part & 32);
    if (part & 16) value -= 2 ** shift;
    runs.push(runs.length > 2 ? value + runs[runs.length - 2] : value);
  }
  return runs;
}

// Every stretch of a mask's columns, on a grid that is at most as fine as the image: act(column, first row, row behind).
function eachStretch({ size: [height], counts }, scale, act) {
  let at = 0;
  runsOf(counts).forEach((length, turn) => {
    const end = at + length;
    while (turn % 2 && at < end) {
      const column = Math.floor(at / height), top = at - column * height, bottom = Math.min(top + end - at, height);
      act(Math.floor(column * scale), Math.floor(top * scale), Math.ceil(bottom * scale));
      at += bottom - top;
    }
    at = end;
  });
}

// The number of the smallest segment at each place, -1 where there is none.
function layOut(answer) {
  const [height, width] = answer.size, scale = Math.min(1, MASK_SIDE / Math.max(height, width));
  const wide = Math.ceil(width * scale), high = Math.ceil(height * scale), owner = new Int16Array(wide * high).fill(-1);
  const order = [...answer.segments.keys()].sort((one, other) => answer.segments[other].area - answer.segments[one].area);
  for (const index of order)
    eachStretch(answer.segments[index].rle, scale, (column, top, bottom) => {
      for (let row = top; row < bottom; row++) owner[row * wide + column] = index;
    });
  return { owner, wide, high, scale };
}

const lit = { one: null, plan: null, index: -1, pinned: -1, canvas: null, line: null };
function planOf(one) {
  if (lit.one !== one) Object.assign(lit, { one, plan: layOut(one.answer), index: -1, pinned: -1 });
  return lit.plan;
}

const colourOf = (one, index) => one.answer.shown?.bars?.[index]?.colour || "#ffc04d";
function describeSegment(one, index) {
  const { label, score, area } = one.answer.segments[index], [height, width] = one.answer.size;
  return `${label}, ${percent(score)} sure, ${percent(area / (height * width))} of the image`;
}

// The rest in shade, and an edge in the segment's colour.
function lightUp(one, index) {
  const { wide, high, scale } = planOf(one), { canvas, line } = lit;
  lit.index = index;
  canvas.hidden = index < 0;
  line.textContent = index < 0 ? idle(one) : describeSegment(one, index);
  const rows = $("top"), row = rows.children[index];
  [...rows.children].forEach((item, at) => item.classList.toggle("lit", at === index));
  // A long list scrolls to the row, as far as it takes.
  if (row) rows.scrollTop = Math.max(Math.min(rows.scrollTop, row.offsetTop), row.offsetTop + row.offsetHeight - rows.clientHeight);
  if (index < 0) return;
  const inside = new Uint8Array(wide * high), [red, green, blue] = [1, 3, 5].map((at) => parseInt(colourOf(one, index).slice(at, at + 2), 16));
  eachStretch(one.answer.segments[index].rle, scale, (column, top, bottom) => {
    for (let row = top; row < bottom; row++) inside[row * wide + column] = 1;
  });
  canvas.width = wide;
  canvas.height = high;
  const context = canvas.getContext("2d"), image = context.createImageData(wide, high), stroke = Math.max(1, Math.round(Math.max(wide, high) / 240));
  const away = (row, column) => row < 0 || column < 0 || row >= high || column >= wide || !inside[row * wide + column];
  for (let row = 0; row < high; row++)
    for (let column = 0; column < wide; column++) {
      const at = row * wide + column;
      const edge = inside[at] && (away(row - stroke, column) || away(row + stroke, column) || away(row, column - stroke) || away(row, column + stroke));
      if (!inside[at]) image.data.set([11, 12, 14, 150], 4 * at);
      else if (edge) image.data.set([red, green, blue, 255], 4 * at);
    }
  context.putImageData(image, 0, 0);
}
const idle = (one) => (one.answer.segments.length ? "Point at a segment, or click to keep it; arrow keys go from one to the next." : "");

// The drawing with its light, in place of the drawing alone.
function frameSegments(one, image) {
  const box = document.createElement("div"), canvas = document.createElement("canvas"), line = document.createElement("p");
  const [height, width] = one.answer.size;
  box.className = "segmented";
  box.style.maxWidth = `calc(26rem * ${width / height})`;
  image.classList.toggle("tiny", Math.max(width, height) < 128); // pixels of a tiny picture stay pixels
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Segments. Arrow keys go from one to the next.");
  box.setAttribute("aria-describedby", "segment-said");
  canvas.id = "segment-light";
  canvas.hidden = true;
  canvas.setAttribute("aria-hidden", "true");
  line.id = "segment-said";
  line.className = "quiet";
  line.textContent = idle(one);
  box.append(image, canvas);
  Object.assign(lit, { canvas, line });
  const under = (event) => {
    const { owner, wide, high } = planOf(one), area = box.getBoundingClientRect();
    const column = clamp(Math.floor(((event.clientX - area.left) / area.width) * wide), wide - 1);
    return owner[clamp(Math.floor(((event.clientY - area.top) / area.height) * high), high - 1) * wide + column];
  };
  box.addEventListener("pointermove", (event) => event.pointerType !== "touch" && point(one, under(event)));
  box.addEventListener("pointerleave", () => point(one, -1));
  box.addEventListener("click", (event) => pin(one, under(event)));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key], number = one.answer.segments.length;
    if (event.key === "Escape") pin(one, -1);
    if (!step || !number || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pin(one, (Math.max(planOf(one) && lit.pinned, step < 0 ? 0 : -1) + step + number) % number, false);
    say(describeSegment(one, lit.pinned));
  });
  return [box, line];
}

// What is pointed at goes before what is kept; the same again lets it go.
function point(one, index) {
  planOf(one);
  const wanted = index < 0 ? lit.pinned : index;
  if (wanted !== lit.index) lightUp(one, wanted);
}
function pin(one, index, again = true) {
  planOf(one);
  lit.pinned = again && lit.pinned === index ? -1 : index;
  lightUp(one, lit.pinned);
}
const rowOf = (event) => [...$("top").children].indexOf(event.target.closest("li"));
$("top").addEventListener("pointerover", (event) => view.current?.answer?.segments && lit.canvas && point(view.current, rowOf(event)));
$("top").addEventListener("pointerleave", () => view.current?.answer?.segments && lit.canvas && point(view.current, -1));
