// What is seen of the chosen picture: the picture, the light on it, the patch that looks, and what is said of it.
const $ = (id) => document.getElementById(id);
const clamp = (value, high) => Math.min(Math.max(value, 0), high);
const view = { current: null, head: ROLLOUT, layer: null, query: TOKEN, patch: null, shown: "light", strength: 1, frame: null };
const kept = { drawn: "", pointed: -1 };

const count = (number, word, words = word + "s") => number.toLocaleString("en") + " " + (number === 1 ? word : words);
const headed = (head) => (head === ROLLOUT ? "rollout" : head === MEAN ? "mean of heads" : "head " + (head + 1));
const place = (about, patch) => `row ${Math.floor(patch / about.grid[1]) + 1}, column ${(patch % about.grid[1]) + 1}`;
const depth = (about) => view.layer ?? about.layers - 1;
const asker = (about) => (about.token ? "the class token" : "all patches on average");

// The map to show, [patches], or null while it is not there.
function mapOf(one, head = view.head) {
  if (!one?.about) return null;
  if (head === ROLLOUT) return one.rollout;
  const layer = one.layers.get(depth(one.about));
  return layer && (head === MEAN || head < layer.heads) ? weights(layer, head, view.query) : null;
}

// Parts of the picture, in its own pixels: all of it, or what the network saw.
function framed(one) {
  const size = one.size ?? one.about?.size ?? [1, 1];
  const whole = [0, 0, ...size];
  if (!one.about) return { region: whole, inside: whole, whole: true };
  const [across, down] = [size[0] / one.about.size[0], size[1] / one.about.size[1]]; // equal to 1, unless the two disagree
  const [left, top, width, height] = one.about.crop, crop = [left * across, top * down, width * across, height * down];
  const long = Math.max(...size) > 2.4 * Math.min(...size);
  const frame = view.shown === "map" || one.blind ? "seen" : (view.frame ?? (long ? "seen" : "whole"));
  return frame === "seen" ? { region: crop, inside: crop, whole: false } : { region: whole, inside: crop, whole: true };
}

function drawPicture(one, { region, whole }) {
  const canvas = $("picture"), source = !whole && one.close ? one.close : one.bitmap;
  const key = [one.id, whole, source?.width, region].join();
  const [width, height] = source || one.about ? region.slice(2) : one.size ?? [5, 2];
  $("pane").style.aspectRatio = `${width} / ${height}`;
  $("pane").style.maxWidth = `calc(min(66vh, 36rem) * ${width / height})`;
  canvas.setAttribute("aria-label", "The image " + one.name);
  if (!source) {
    canvas.width = canvas.height = 1;
    kept.drawn = "";
  } else if (kept.drawn !== key) {
    const scale = source === one.close ? source.width / width : source.width / one.size[0];
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    canvas.classList.toggle("tiny", Math.max(width, height) < 128); // pixels of a tiny picture stay pixels
    const from = source === one.close ? [0, 0] : [region[0] * scale, region[1] * scale];
    canvas.getContext("2d").drawImage(source, ...from, canvas.width, canvas.height, 0, 0, canvas.width, canvas.height);
    kept.drawn = key;
  }
}

function drawLight(one, { region, inside, whole }) {
  const about = one.about, row = mapOf(one), seen = $("seen");
  seen.hidden = !about;
  $("pane").classList.toggle("whole", Boolean(about) && whole && inside.join() !== region.join());
  $("picture").classList.toggle("away", Boolean(about) && view.shown === "map");
  if (!about) return;
  const share = (part, all) => (100 * part) / all + "%";
  Object.assign(seen.style, {
    left: share(inside[0] - region[0], region[2]), top: share(inside[1] - region[1], region[3]),
    width: share(inside[2], region[2]), height: share(inside[3], region[3]),
  });
  const canvas = $("light-map"), query = view.head === ROLLOUT ? TOKEN : view.query;
  canvas.classList.toggle("late", !row);
  if (row) paint(canvas, row, about.grid, query, view.shown === "light" && !one.blind);
  canvas.style.opacity = view.shown === "map" || one.blind ? 1 : view.shown === "light" ? view.strength : 0.85 * view.strength;
  $("leads").hidden = about.grid[1] > 48; // finer ones would be all lead
  $("leads").style.backgroundSize = `${100 / about.grid[1]}% ${100 / about.grid[0]}%`;
  drawCell(one, row, query);
}

// One cell stands for the grid: the others are counted, not made.
let turn = 0;
function drawCell(one, row, query) {
  const [rows, columns] = one.about.grid, grid = $("grid"), line = grid.firstElementChild, cell = line.firstElementChild;
  grid.setAttribute("aria-rowcount", rows);
  grid.setAttribute("aria-colcount", columns);
  cell.hidden = query === TOKEN;
  if (cell.hidden) {
    grid.removeAttribute("aria-activedescendant");
    cell.removeAttribute("aria-selected");
    return;
  }
  const [down, across] = [Math.floor(query / columns), query % columns];
  const name = `The patch in ${place(one.about, query)} looks` + (row ? `, mostly at ${place(one.about, told(row, query).best)}` : "");
  if (cell.getAttribute("aria-label") !== name) cell.id = "cell-" + (turn ^= 1); // a new name under an old id is not read out
  cell.setAttribute("aria-label", name);
  cell.setAttribute("aria-selected", "true");
  cell.setAttribute("aria-colindex", across + 1);
  line.setAttribute("aria-rowindex", down + 1);
  grid.setAttribute("aria-activedescendant", cell.id);
  Object.assign(cell.style, { left: (100 * across) / columns + "%", top: (100 * down) / rows + "%", width: 100 / columns + "%", height: 100 / rows + "%" });
}

// Two parts: what is looked at, and what there is to say of it.
function readout(one) {
  const about = one.about, row = mapOf(one);
  if (!row) return ["", ""];
  const patches = about.grid[0] * about.grid[1], query = view.head === ROLLOUT ? TOKEN : view.query, { best, half } = told(row, query);
  const spread = `falls on ${half} of ${count(patches, "patch", "patches")}.`;
  if (view.head === ROLLOUT) return [`Rollout through ${about.layers === 1 ? "the one layer" : `all ${about.layers} layers`}`, `: ${model.queries ? "the encoder without its queries" : "the answer"} draws most on the patch in ${place(about, best)}. Half of its light ${spread}`];
  const who = query === TOKEN ? asker(about) : `the patch in ${place(about, query)}`;
  const own = query === TOKEN ? "" : `gives ${percent(row[query])} to itself and `;
  return [`Layer ${depth(about) + 1}, ${headed(view.head)}`, `: ${who} ${own}${query === TOKEN && !about.token ? "look" : "looks"} most at ${place(about, best)} (${percent(row[best])}). Half of what goes to patches ${spread}`];
}

function under(one) {
  if (one.blind) return "";
  const row = mapOf(one);
  if (kept.pointed >= 0 && row && kept.pointed < row.length) {
    const lit = view.head === ROLLOUT ? "" : " · " + percent(row[kept.pointed]);
    return place(one.about, kept.pointed) + lit;
  }
  return one.size ? one.size.map((side) => side.toLocaleString("en")).join(" × ") : "";
}

function drawStage(one) {
  const frame = framed(one);
  drawPicture(one, frame);
  drawLight(one, frame);
  $("name").textContent = one.name;
  $("under").textContent = under(one);
  const blind = $("blind");
  blind.hidden = !one.blind;
  blind.textContent = one.error ? "Nothing to show" : one.about ? "This browser cannot show the file; the network can read it. Here is the map alone." : "This browser cannot show the file. The network may be able to read it.";
  blind.classList.toggle("low", Boolean(one.about));
  if (one.about && !frame.whole) opened(one, frame.inside).then(() => one.close && view.current === one && drawPicture(one, framed(one)));
}

// The layer's heads side by side, which is also how one of them is chosen.
function drawTiles(one) {
  const box = $("tiles"), about = one.about;
  const kinds = [ROLLOUT, MEAN, ...(about.heads > 1 ? Array(about.heads).keys() : [])];
  if (box.childElementCount !== kinds.length) {
    box.replaceChildren(
      ...kinds.map((head) => {
        const tile = document.createElement("button"), name = document.createElement("span");
        tile.type = "button";
        tile.setAttribute("role", "radio");
        tile.dataset.head = head;
        name.textContent = head === MEAN ? "mean" : headed(head);
        tile.append(document.createElement("canvas"), name);
        return tile;
      }),
    );
  }
  [...box.children].forEach((tile, at) => {
    const head = kinds[at], chosen = head === view.head, row = mapOf(one, head);
    tile.setAttribute("aria-checked", String(chosen));
    tile.tabIndex = chosen ? 0 : -1;
    tile.classList.toggle("late", !row);
    if (row) paint(tile.firstChild, row, about.grid, head === ROLLOUT ? TOKEN : view.query, false);
  });
}
