"use strict";
// The attention explorer. Bytes are roots of weights over the largest of their row; rows of weights sum to one.
for (const root of document.querySelectorAll(".explorer")) {
  const get = (selector) => root.querySelector(selector);
  const number = (name) => Number(root.dataset[name]);
  const layers = number("layers"), heads = number("heads"), rows = number("rows"), columns = number("columns");
  const kept = new Set(root.dataset.kept.split(" ").filter(Boolean).map(Number));
  const prefix = [...root.querySelectorAll(".prefix li")].map((item) => item.textContent);
  const tokens = prefix.length + rows * columns;
  const stage = get(".canvas"), canvas = get("canvas.light"), mark = get(".query"), atlas = get(".atlas");
  const pictures = [...stage.querySelectorAll("img")], buttons = [...root.querySelectorAll(".choose button")];
  const knobs = { layer: get("input.layer"), head: get("select.head"), token: get("select.token"), look: get("select.look") };
  const ROLLOUT = "rollout", MEAN = "mean";
  const kinds = [ROLLOUT, MEAN, ...Array.from({ length: heads > 1 ? heads : 0 }, (_, head) => head)];
  const state = { picture: 0, query: number("start"), layer: layers - 1, head: ROLLOUT, look: "light" };

  const starts = [0];
  for (let layer = 0; layer < layers; layer++) starts.push(starts[layer] + (kept.has(layer) ? heads : 1) * tokens * tokens);

  // Decoding, once a picture.
  const bytes = [], means = [];
  function stored(picture) {
    if (!bytes[picture]) {
      const text = atob(pictures[picture].dataset.weights);
      bytes[picture] = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    }
    return bytes[picture];
  }
  function read(picture, layer, block, query, into, share) {
    const all = stored(picture), start = starts[layer] + (block * tokens + query) * tokens;
    let sum = 0;
    for (let key = 0; key < tokens; key++) sum += all[start + key] ** 2;
    for (let key = 0; key < tokens; key++) into[key] += (share * all[start + key] ** 2) / sum;
    return into;
  }
  function mean(picture, layer) {
    means[picture] ??= [];
    if (!means[picture][layer]) {
      const blocks = kept.has(layer) ? heads : 1, matrix = new Float32Array(tokens * tokens);
      for (let query = 0; query < tokens; query++) {
        const row = matrix.subarray(query * tokens, (query + 1) * tokens);
        for (let block = 0; block < blocks; block++) read(picture, layer, block, query, row, 1 / blocks);
      }
      means[picture][layer] = matrix;
    }
    return means[picture][layer];
  }
  // Half of what a token is comes past the layer, half through its attention: the row of a product of matrices.
  function rollout(picture, layer, query) {
    let row = new Float32Array(tokens);
    row[query] = 1;
    for (let at = layer; at >= 0; at--) {
      const matrix = mean(picture, at), next = new Float32Array(tokens);
      for (let i = 0; i < tokens; i++) {
        if (!row[i]) continue;
        const half = row[i] / 2, start = i * tokens;
        next[i] += half;
        for (let key = 0; key < tokens; key++) next[key] += half * matrix[start + key];
      }
      row = next;
    }
    return row;
  }
  function weights(layer, head) {
    if (head === ROLLOUT) return rollout(state.picture, layer, state.query);
    if (head === MEAN) return mean(state.picture, layer).slice(state.query * tokens, (state.query + 1) * tokens);
    return kept.has(layer) ? read(state.picture, layer, head, state.query, new Float32Array(tokens), 1) : null;
  }

  // Drawing.
  const ramp = [[0, 0, 4], [28, 16, 68], [79, 18, 123], [129, 37, 129], [181, 54, 122], [229, 80, 100], [251, 135, 97], [254, 194, 135], [252, 253, 191]];
  function colour(value) {
    const place = Math.min(Math.max(value, 0), 1) * (ramp.length - 1), low = Math.min(Math.floor(place), ramp.length - 2);
    return ramp[low].map((from, at) => from + (ramp[low + 1][at] - from) * (place - low));
  }
  function range(row) {
    let least = Infinity, most = 0;
    for (let at = prefix.length; at < tokens; at++) {
      if (at === state.query) continue;
      if (row[at] > most) most = row[at];
      if (row[at] < least) least = row[at];
    }
    return [least, Math.max(most - least, 1e-12)];
  }
  function paint(target, row, light) {
    const image = new ImageData(columns, rows), [least, span] = range(row);
    for (let at = 0; at < rows * columns; at++) {
      const value = Math.min(Math.max((row[prefix.length + at] - least) / span, 0), 1);
      const [red, green, blue] = light ? [0, 0, 0] : colour(value);
      image.data.set([red, green, blue, light ? 235 * (1 - value) ** 1.35 : 255], 4 * at);
    }
    target.width = columns;
    target.height = rows;
    target.getContext("2d").putImageData(image, 0, 0);
  }
  const percent = (share) => (share >= 0.9995 ? "100" : (100 * share).toFixed(share < 0.0995 ? 1 : 0)) + "\u00a0%";
  const place = (at) => "row " + (Math.floor((at - prefix.length) / columns) + 1) + ", column " + (((at - prefix.length) % columns) + 1);
  const named = (at) => (at >= prefix.length ? "the patch in " + place(at) : /\d$/.test(prefix[at]) ? prefix[at] : "the " + prefix[at]);
  const headed = (head) => (head === ROLLOUT ? "rollout" : head === MEAN ? "mean of heads" : "head " + (head + 1));

  function tell(row) {
    let best = prefix.length, near = 0;
    const patch = state.query - prefix.length;
    for (let at = prefix.length; at < tokens; at++) {
      if (at !== state.query && (best === state.query || row[at] > row[best])) best = at;
      const down = Math.floor((at - prefix.length) / columns) - Math.floor(patch / columns);
      const across = ((at - prefix.length) % columns) - (patch % columns);
      if (patch >= 0 && Math.max(Math.abs(down), Math.abs(across)) === 1) near += row[at];
    }
    const how = state.head === ROLLOUT ? "Rollout through layers 1 to " + (state.layer + 1) : "Layer " + (state.layer + 1) + ", " + headed(state.head);
    const parts = [percent(row[state.query]) + " to itself"];
    if (patch >= 0) parts.push(percent(near) + " to its neighbours");
    const others = new Map(); // tokens of one kind together: register 1 to 4 are the registers
    prefix.forEach((name, at) => {
      const kind = name.replace(/ \d+$/, "");
      if (at !== state.query) others.set(kind, [...(others.get(kind) ?? []), at]);
    });
    for (const [kind, all] of others) {
      const again = state.query < prefix.length && prefix[state.query].startsWith(kind + " ");
      const whom = all.length > 1 ? "the " + (again ? "other " : "") + kind + "s" : named(all[0]);
      parts.push(percent(all.reduce((sum, at) => sum + row[at], 0)) + " to " + whom);
    }
    const strong = document.createElement("b");
    strong.textContent = how;
    const text = ": " + named(state.query) + " gives " + parts.join(", ") + ". Brightest is " + named(best) + " (" + percent(row[best]) + ").";
    get(".readout").replaceChildren(strong, text);
  }

  function draw() {
    if (typeof state.head === "number" && !kept.has(state.layer)) state.head = MEAN;
    const row = weights(state.layer, state.head);
    paint(canvas, row, state.look === "light");
    canvas.style.imageRendering = "pixelated";
    canvas.style.opacity = state.look === "light" ? 1 : 0.82;
    pictures.forEach((picture, at) => (picture.hidden = at !== state.picture));
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(at === state.picture)));
    const patch = state.query - prefix.length;
    mark.hidden = patch < 0;
    if (patch >= 0) {
      mark.style.left = (100 * (patch % columns)) / columns + "%";
      mark.style.top = (100 * Math.floor(patch / columns)) / rows + "%";
      mark.style.width = 100 / columns + "%";
      mark.style.height = 100 / rows + "%";
    }
    knobs.layer.value = state.layer + 1;
    get("output").textContent = state.layer + 1 + " of " + layers;
    knobs.head.value = String(state.head);
    for (const option of knobs.head.options) option.disabled = !isNaN(option.value) && !kept.has(state.layer);
    knobs.token.value = patch < 0 ? String(state.query) : "patch";
    knobs.look.value = state.look;
    tell(row);
    for (const cell of atlas.querySelectorAll("td")) {
      cell.classList.toggle("on", cell.dataset.head === String(state.head) && Number(cell.dataset.layer) === state.layer);
    }
  }
  function chart() {
    for (const cell of atlas.querySelectorAll("td[data-head]")) {
      const head = isNaN(cell.dataset.head) ? cell.dataset.head : Number(cell.dataset.head);
      paint(cell.firstChild, weights(Number(cell.dataset.layer), head), false);
    }
  }
  let waiting = 0;
  function ask(changes) {
    const old = state.query, shown = state.picture;
    Object.assign(state, changes);
    draw();
    if (old === state.query && shown === state.picture) return;
    clearTimeout(waiting); // the small pictures follow when the keys rest
    waiting = setTimeout(chart, 60);
  }

  // Building what depends on the numbers of layers and heads.
  function build() {
    for (const head of kinds) knobs.head.add(new Option(headed(head), String(head)));
    prefix.forEach((_, at) => knobs.token.add(new Option(named(at), String(at))));
    knobs.token.add(new Option("a patch", "patch"));
    const top = atlas.createTHead().insertRow();
    top.append(document.createElement("th"));
    for (let layer = 0; layer < layers; layer++) {
      const name = document.createElement("th");
      name.scope = "col";
      name.textContent = layer + 1;
      top.append(name);
    }
    const body = atlas.createTBody();
    for (const head of kinds) {
      const line = body.insertRow(), name = document.createElement("th");
      name.scope = "row";
      name.textContent = head === MEAN ? "mean" : headed(head);
      line.append(name);
      for (let layer = 0; layer < layers; layer++) {
        const cell = line.insertCell();
        if (typeof head === "number" && !kept.has(layer)) {
          cell.className = "none";
          cell.textContent = "·";
          continue;
        }
        cell.dataset.layer = layer;
        cell.dataset.head = head;
        cell.append(document.createElement("canvas"));
      }
    }
  }
  const clamp = (value, high) => Math.min(Math.max(value, 0), high);
  function moved(down, across) {
    const patch = state.query < prefix.length ? Math.floor(rows / 2) * columns + Math.floor(columns / 2) : state.query - prefix.length;
    const row = clamp(Math.floor(patch / columns) + down, rows - 1), column = clamp((patch % columns) + across, columns - 1);
    ask({ query: prefix.length + row * columns + column });
  }
  const arrows = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const common = {
    "+": () => ask({ layer: clamp(state.layer + 1, layers - 1) }),
    "=": () => ask({ layer: clamp(state.layer + 1, layers - 1) }),
    "-": () => ask({ layer: clamp(state.layer - 1, layers - 1) }),
    h: () => {
      const there = kinds.filter((head) => typeof head !== "number" || kept.has(state.layer));
      ask({ head: there[(there.indexOf(state.head) + 1) % there.length] });
    },
    c: () => ask({ query: number("start") }),
  };
  function listen(element, onArrow) {
    element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const arrow = arrows[event.key], act = arrow ? () => onArrow(...arrow) : common[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }
  listen(stage, moved);
  listen(atlas, (down, across) => {
    const head = kinds[clamp(kinds.indexOf(state.head) + down, kinds.length - 1)];
    ask({ layer: clamp(state.layer + across, layers - 1), head });
  });
  stage.addEventListener("click", (event) => {
    const box = stage.getBoundingClientRect();
    const column = clamp(Math.floor(((event.clientX - box.left) / box.width) * columns), columns - 1);
    const row = clamp(Math.floor(((event.clientY - box.top) / box.height) * rows), rows - 1);
    ask({ query: prefix.length + row * columns + column });
  });
  atlas.addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-head]");
    if (cell) ask({ layer: Number(cell.dataset.layer), head: isNaN(cell.dataset.head) ? cell.dataset.head : Number(cell.dataset.head) });
  });
  buttons.forEach((button, at) => button.addEventListener("click", () => ask({ picture: at })));
  knobs.layer.addEventListener("input", () => ask({ layer: Number(knobs.layer.value) - 1 }));
  knobs.head.addEventListener("change", () => ask({ head: isNaN(knobs.head.value) ? knobs.head.value : Number(knobs.head.value) }));
  knobs.token.addEventListener("change", () => (knobs.token.value === "patch" ? moved(0, 0) : ask({ query: Number(knobs.token.value) })));
  knobs.look.addEventListener("change", () => ask({ look: knobs.look.value }));
  build();
  draw();
  chart();
}
