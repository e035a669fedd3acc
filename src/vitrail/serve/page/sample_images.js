// Two pictures to try, drawn when they are asked for: a sailing boat, and a figure as a hand writes it.
function boat(context, side) {
  const at = (value) => value * side, horizon = 0.62, waterline = 0.72;
  const fill = (style, ...points) => {
    context.fillStyle = style;
    context.beginPath();
    points.forEach(([x, y]) => context.lineTo(at(x), at(y)));
    context.closePath();
    context.fill();
  };
  const fade = (top, bottom, from, to) => {
    const gradient = context.createLinearGradient(0, at(top), 0, at(bottom));
    gradient.addColorStop(0, from);
    gradient.addColorStop(1, to);
    return gradient;
  };
  const part = (style, ...points) => fill(style, ...points.map(([x, y]) => [0.5 + 0.8 * x, waterline + 0.8 * y]));
  fill(fade(0, horizon, "#4f8fcb", "#dfeaf2"), [0, 0], [1, 0], [1, horizon + 0.01], [0, horizon + 0.01]);
  context.fillStyle = "rgb(255 255 255 / 0.5)";
  for (const [x, y, r] of [[0.2, 0.2, 0.06], [0.27, 0.18, 0.08], [0.35, 0.21, 0.055], [0.8, 0.32, 0.04], [0.86, 0.31, 0.055]]) {
    context.beginPath();
    context.ellipse(at(x), at(y), at(r), at(0.4 * r), 0, 0, 7);
    context.fill();
  }
  fill("#5d7f86", [0, 0.6], [0.12, 0.575], [0.3, 0.605], [0.46, 0.62], [0, 0.625]);
  fill(fade(horizon, 1, "#4a86ab", "#123f66"), [0, horizon], [1, horizon], [1, 1], [0, 1]);
  context.lineWidth = at(0.005);
  for (let wave = 0; wave < 60; wave++) {
    const near = wave / 60, y = horizon + 0.01 + (1 - horizon) * near ** 1.5, x = ((wave * 0.381966) % 1.1) - 0.05, long = 0.02 + 0.09 * near;
    context.strokeStyle = wave % 2 ? "rgb(255 255 255 / 0.22)" : "rgb(6 40 70 / 0.25)";
    context.beginPath();
    context.moveTo(at(x), at(y));
    context.quadraticCurveTo(at(x + long / 2), at(y - 0.01), at(x + long), at(y));
    context.stroke();
  }
  part("#3a3330", [-0.004, -0.66], [0.004, -0.66], [0.006, 0], [-0.006, 0]);
  part(fade(0.24, waterline, "#ffffff", "#d9d6cd"), [0.012, -0.64], [0.07, -0.4], [0.21, -0.06], [0.012, -0.05]);
  part(fade(0.24, waterline, "#f4f2ea", "#c4c2ba"), [-0.012, -0.6], [-0.09, -0.3], [-0.23, -0.045], [-0.02, -0.05]);
  part("#7a2a2c", [-0.27, -0.03], [0.27, -0.02], [0.22, 0.035], [-0.2, 0.04]);
  part("#f2efe6", [-0.27, -0.03], [0.27, -0.02], [0.265, -0.01], [-0.265, -0.018]);
}

function figure(context, side) {
  const at = (value) => value * side;
  context.fillStyle = "#000";
  context.fillRect(0, 0, side, side);
  context.strokeStyle = "#fff";
  context.lineWidth = at(0.11);
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  context.moveTo(at(0.32), at(0.28));
  context.bezierCurveTo(at(0.4), at(0.12), at(0.72), at(0.14), at(0.68), at(0.36));
  context.bezierCurveTo(at(0.65), at(0.52), at(0.45), at(0.66), at(0.33), at(0.82));
  context.lineTo(at(0.72), at(0.79));
  context.stroke();
}

// Each is for networks that have a class for it: a classifier of flowers has nothing to say about a boat.
const samples = [
  { name: "boat.png", said: "a sailing boat", draw: boat, suits: (labels) => labels.some((one) => /\b(ship|boat|sailboat|yawl|schooner)s?\b/i.test(one)) },
  { name: "two.png", said: "a handwritten 2", draw: figure, suits: (labels) => labels.length <= 10 && labels.some((one) => /^(2|two)$/i.test(one)) },
];

function drawn(sample, side) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  sample.draw(canvas.getContext("2d"), side);
  return canvas;
}

const fileOf = (sample) =>
  new Promise((done) => drawn(sample, 384).toBlob((blob) => done(new File([blob], sample.name, { type: "image/png" })), "image/png"));
