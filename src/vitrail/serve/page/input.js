// What the person does: files in, choices, keys.
function choose(one) {
  view.current = one;
  one.used = performance.now();
  kept.pointed = -1;
  open(one).then(() => (tidy(pictures, view.current), show()));
  show();
  pump();
}

function take(files) {
  const room = MOST - pictures.length, fresh = [...files].slice(0, Math.max(room, 0)).map(picture);
  if (files.length > fresh.length) notice(`${MOST} pictures are kept at once; ${files.length - fresh.length} were left out. Remove some first.`);
  else notice("");
  if (!fresh.length) return;
  const first = !pictures.length;
  pictures.push(...fresh);
  choose(fresh[0]);
  for (const one of fresh.slice(1)) {
    // Thumbnails of all; the pictures themselves are given up again as others come.
    open(one).then(() => (tidy(pictures, view.current), show()));
  }
  if (fresh.length > 1) say(`${fresh.length} pictures were added.`);
  if (first) requestAnimationFrame(() => requestAnimationFrame(() => document.activeElement === document.body && $("grid").focus({ preventScroll: true })));
}

function remove(one) {
  const at = pictures.indexOf(one);
  if (at < 0) return;
  forget(one);
  pictures.splice(at, 1);
  const next = pictures[Math.min(at, pictures.length - 1)] ?? null;
  if (next) choose(next);
  else view.current = null;
  render();
  if (next) $("strip").querySelector("[aria-current=true]")?.focus();
  else $("welcome").querySelector("[data-choose]").focus();
}

// A change of what is looked at.
function turnTo(changes) {
  const one = view.current;
  if (!one?.about) return;
  Object.assign(view, changes);
  if (view.query !== TOKEN) view.patch = view.query;
  show();
  attend();
  requestAnimationFrame(() => say(readout(one).join(""), 500)); // once the keys rest
}
const atPatch = (query) => turnTo({ query, head: view.head === ROLLOUT ? MEAN : view.head });

function moved(down, across) {
  const [rows, columns] = view.current.about.grid, middle = Math.floor(rows / 2) * columns + Math.floor(columns / 2);
  const asked = view.query !== TOKEN && view.head !== ROLLOUT;
  if (!asked) return atPatch(view.patch ?? middle);
  const row = clamp(Math.floor(view.query / columns) + down, rows - 1), column = clamp((view.query % columns) + across, columns - 1);
  return atPatch(row * columns + column);
}
const kindsOf = () => [...$("tiles").children].map((tile) => headOf(tile));
const headOf = (tile) => (isNaN(tile.dataset.head) ? tile.dataset.head : Number(tile.dataset.head));
function toHead(step) {
  const kinds = kindsOf();
  turnTo({ head: kinds[(kinds.indexOf(view.head) + step + kinds.length) % kinds.length] });
}
function toLayer(layer) {
  turnTo({ layer: clamp(layer, view.current.about.layers - 1), head: view.head === ROLLOUT ? MEAN : view.head });
}

const keys = {
  ArrowUp: () => moved(-1, 0), ArrowDown: () => moved(1, 0), ArrowLeft: () => moved(0, -1), ArrowRight: () => moved(0, 1),
  Home: () => moved(0, -1e6), End: () => moved(0, 1e6),
  "+": () => toLayer(depth(view.current.about) + 1), "=": () => toLayer(depth(view.current.about) + 1), "-": () => toLayer(depth(view.current.about) - 1),
  h: () => toHead(1), c: () => turnTo({ query: TOKEN }),
};
function onKeys(element, table) {
  element.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? null : table[event.key];
    if (!act || !view.current?.about) return;
    event.preventDefault();
    act();
  });
}
onKeys($("grid"), keys);
const stepped = (back, ahead) => ({ ArrowLeft: back, ArrowUp: back, ArrowRight: ahead, ArrowDown: ahead });
function toTile(step) {
  toHead(step);
  render();
  $("tiles").querySelector("[aria-checked=true]")?.focus();
}
onKeys($("tiles"), stepped(() => toTile(-1), () => toTile(1)));
$("strip").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -1e6, End: 1e6 }[event.key];
  if (event.key === "Delete") remove(view.current);
  if (!step) return;
  event.preventDefault();
  choose(pictures[clamp(pictures.indexOf(view.current) + step, pictures.length - 1)]);
  render();
  const item = $("strip").querySelector("[aria-current=true]");
  item?.focus();
  item?.scrollIntoView({ block: "nearest", inline: "nearest" });
});

function pointed(event) {
  const box = $("grid").getBoundingClientRect(), [rows, columns] = view.current.about.grid;
  const column = clamp(Math.floor(((event.clientX - box.left) / box.width) * columns), columns - 1);
  return clamp(Math.floor(((event.clientY - box.top) / box.height) * rows), rows - 1) * columns + column;
}
$("grid").addEventListener("click", (event) => view.current?.about && atPatch(pointed(event)));
$("grid").addEventListener("pointermove", (event) => {
  if (!view.current?.about || event.pointerType === "touch") return;
  kept.pointed = pointed(event);
  $("under").textContent = under(view.current);
});
$("grid").addEventListener("pointerleave", () => ((kept.pointed = -1), view.current && ($("under").textContent = under(view.current))));
$("tiles").addEventListener("click", (event) => {
  const tile = event.target.closest("button");
  if (tile) turnTo({ head: headOf(tile) });
});
$("layer").addEventListener("input", () => toLayer(Number($("layer").value) - 1));
$("strength").addEventListener("input", () => ((view.strength = Number($("strength").value) / 100), show()));
const onChoice = (name, act) => {
  for (const input of document.querySelectorAll(`input[name=${name}]`)) input.addEventListener("change", () => act(input.value));
};
onChoice("who", (who) => (who === "token" ? turnTo({ query: TOKEN }) : moved(0, 0)));
onChoice("shown", (shown) => turnTo({ shown }));
onChoice("frame", (frame) => turnTo({ frame }));

$("again").addEventListener("click", () => retry((error) => error === view.current.error));
$("remove").addEventListener("click", () => remove(view.current));
$("clear").addEventListener("click", () => {
  for (const one of pictures.splice(0)) forget(one);
  view.current = null;
  render();
  $("welcome").querySelector("[data-choose]").focus();
});
$("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  access.token = $("token").value.trim();
  $("token").value = "";
  $("gate").hidden = true;
  $("token-why").textContent = "That was not the token of this server. Is it the one that it was started with?"; // shown if it asks again
  meet().then(() => model.known && retry((error) => error.status === 401));
});

// Without a secure context there is no clipboard; a selection still copies.
async function copy(source, button) {
  let done = false;
  try {
    await navigator.clipboard.writeText(source.textContent);
    done = true;
  } catch {
    const selection = getSelection();
    selection.removeAllRanges();
    selection.selectAllChildren(source);
    done = document.execCommand("copy");
  }
  button.textContent = done ? "Copied" : "Selected";
  say(done ? "Copied." : "Selected: copy it by hand.");
  clearTimeout(button.timer);
  button.timer = setTimeout(() => (button.textContent = "Copy"), 1600);
}
$("copy-curl").addEventListener("click", () => copy($("curl"), $("copy-curl")));
$("copy-json").addEventListener("click", () => copy($("json"), $("copy-json")));

// Files: chosen, dropped, pasted.
for (const button of document.querySelectorAll("[data-choose]")) button.addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  take([...$("files").files]);
  $("files").value = ""; // so that the same one can be chosen again
});
const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
let inside = 0;
const veil = (over) => ($("veil").hidden = !over);
addEventListener("dragenter", (event) => carries(event) && (inside++, veil(true)));
addEventListener("dragleave", (event) => carries(event) && ((inside = Math.max(inside - 1, 0)), veil(inside > 0)));
addEventListener("dragover", (event) => carries(event) && event.preventDefault());
addEventListener("drop", (event) => {
  inside = 0;
  veil(false);
  if (!carries(event)) return;
  event.preventDefault();
  take([...event.dataTransfer.files]);
});
addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length) return;
  event.preventDefault();
  take(files);
});

// ---- the beginning ---------------------------------------------------------------------------------------------
for (const [group, shape, number] of [["fields", "field", 24], ["backs", "back", 12], ["petals", "petal", 12], ["hearts", "heart", 12], ["lights", "light", 12]]) {
  for (let at = 0; at < number; at++) {
    const pane = document.createElementNS("http://www.w3.org/2000/svg", "use");
    pane.setAttribute("href", "#" + shape);
    pane.setAttribute("transform", `rotate(${(360 * (at + (group === "backs" ? 0.5 : 0))) / number})`);
    pane.setAttribute("class", ["one", "two"][at % 2]);
    document.querySelector(".rose ." + group).append(pane);
  }
}
function offer() {
  const box = $("samples"), fitting = samples.filter((sample) => sample.suits(model.labels ?? []));
  box.querySelectorAll("button").forEach((old) => old.remove());
  for (const sample of fitting) {
    const button = document.createElement("button"), name = document.createElement("span");
    button.type = "button";
    name.textContent = sample.said;
    button.append(drawn(sample, 144), name);
    button.addEventListener("click", async () => take([await fileOf(sample)]));
    box.append(button);
  }
  box.hidden = !fitting.length;
}

// What it can say at all. Thousands of names are made into a list when somebody opens it.
const FEW = 24; // classes that are shown at once
function listClasses() {
  const labels = model.labels ?? [], box = $("classes"), unnamed = labels.length > 10 && labels.every((one) => /^(class )?\d+$/.test(one));
  box.hidden = !labels.length;
  box.querySelector("summary").textContent = model.options.includes("topk") ? `The ${count(labels.length, "class", "classes")} that it knows` : `Its ${model.outputs}`;
  $("unnamed").hidden = !unnamed;
  $("find-class").hidden = unnamed || labels.length <= FEW;
  box.open = labels.length <= FEW && !unnamed;
  box.ontoggle = () => box.open && !unnamed && nameClasses();
  $("class-part").oninput = nameClasses;
  if (box.open) nameClasses();
}
function nameClasses() {
  const part = $("class-part").value.trim().toLowerCase();
  const items = (model.labels ?? []).flatMap((one, at) => (one.toLowerCase().includes(part) ? [[one, at]] : []));
  $("class-names").replaceChildren(
    ...items.map(([one, at]) => {
      const item = document.createElement("li");
      item.textContent = one;
      item.value = at;
      return item;
    }),
  );
}
$("where").textContent = `Pictures go to the server at ${host} and nowhere else; it does not keep them.`;
meet();
