"""The Vision Transformer once more, in numpy and float64, one equation a line: what the module is compared with.

Parts of later families are here as well, each as its paper or first code describes it, by loops over tokens.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.models.vit_config import ViTConfig

Array = NDArray[np.float64]
Weights = dict[str, Array]


def arrays(tensors: dict[str, Tensor]) -> Weights:
    return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * scale + bias


def norm_at(x: Array, w: Weights, at: str, c: ViTConfig) -> Array:
    """The norm of that name; x as it is where there is none."""
    if f"{at}.weight" not in w:
        return x
    if c.norm == "rms":
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + c.norm_eps) * w[f"{at}.weight"]
    return norm(x, w[f"{at}.weight"], w[f"{at}.bias"], c.norm_eps)


def linear(x: Array, w: Weights, at: str) -> Array:
    return x @ w[f"{at}.weight"].T + w.get(f"{at}.bias", 0)


def gelu(x: Array, form: str) -> Array:
    if form == "quick":
        return x / (1 + np.exp(-1.702 * x))
    if form == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def embed(image: Array, w: Weights, c: ViTConfig) -> Array:
    """x_p E: patches in raster order, each flattened as (row, column, channel)."""
    ph, pw = c.patch
    e = w["embedding.projection.weight"].transpose(2, 3, 1, 0).reshape(-1, c.width)
    patches = [
        image[:, r * ph : (r + 1) * ph, s * pw : (s + 1) * pw].transpose(1, 2, 0).reshape(-1)
        for r in range(c.image[0] // ph)
        for s in range(c.image[1] // pw)
    ]
    return np.stack(patches) @ e + w.get("embedding.projection.bias", 0)


def table(w: Weights, c: ViTConfig, layer: int) -> Array | None:
    """What positions add to the tokens at the input of a layer: [T, D], or nothing."""
    placement = c.placement or "stem"
    if c.position in ("none", "relative") or (placement == "stem" and layer):
        return None
    at = f"position.tables.{layer if placement == 'every' else 0}"
    first = c.position_rows
    rows, columns = c.grid
    out = np.zeros((c.tokens, c.width))
    for r in range(rows):
        for s in range(columns):
            n = r * columns + s
            match c.position:
                case "learned":
                    vector = learned(w[f"{at}.table"][0, first:], c, r, s)
                case "learned2d":
                    vector = np.concatenate([w[f"{at}.columns"][s], w[f"{at}.rows"][r]])
                case "learned2d-sum":
                    vector = w[f"{at}.columns"][s] + w[f"{at}.rows"][r]
                case _:
                    vector = sine(r, s, c.width)
            out[c.prefix + n] = vector
    if first and c.position != "sincos2d":
        out[:first] = w[f"{at}.table"][0, :first] if c.position == "learned" else w[f"{at}.prefix"][0]
    return out


def learned(vectors: Array, c: ViTConfig, row: int, column: int) -> Array:
    """A place of the learned grid; one of its own is stretched over the patches from corner to corner."""
    grid = vectors.reshape(*c.table_grid, -1)
    if c.table_grid == c.grid:
        return grid[row, column]
    spots = [place * (old - 1) / (new - 1) for place, old, new in zip((row, column), c.table_grid, c.grid, strict=True)]
    return between(grid, *spots)


def sine(row: int, column: int, width: int) -> Array:
    rates = [10_000 ** (-i / (width // 4 - 1)) for i in range(width // 4)]
    return np.array([f(p * rate) for p in (column, row) for f in (math.sin, math.cos) for rate in rates])


def turn(x: Array, w: Weights, c: ViTConfig, layer: int, head: int) -> Array:
    """Queries or keys of one head turned by rotary positions, pair of numbers by pair: [T, D_h] -> [T, D_h]."""
    rotary, size, out = c.rotary, c.head_size, x.copy()
    assert rotary is not None
    for n in range(c.patches):
        places = [float(n // c.grid[1]), float(n % c.grid[1])]
        if rotary.coordinates == "unit":
            places = [math.pi * 2 * (2 * (p + 0.5) / length - 1) for p, length in zip(places, c.grid, strict=True)]
        else:
            places = [p + rotary.offset for p in places]
            if rotary.reference is not None:
                scales = zip(places, rotary.reference, c.grid, strict=True)
                places = [p * own / length for p, own, length in scales]
        places = places if rotary.order == "yx" else places[::-1]
        for pair in range(size // 2):
            if rotary.mixed:
                frequencies = w["rotary.frequencies"][layer, :, head, pair]
                angle = places[0] * frequencies[0] + places[1] * frequencies[1]
            else:
                axis, step = divmod(pair, size // 4)
                angle = places[axis] * rotary.base ** (-4 * step / size)
            a, b = (2 * pair, 2 * pair + 1) if rotary.layout == "pairs" else (pair, pair + size // 2)
            t = c.prefix + n
            out[t, a] = x[t, a] * math.cos(angle) - x[t, b] * math.sin(angle)
            out[t, b] = x[t, b] * math.cos(angle) + x[t, a] * math.sin(angle)
    return out


def bias(q: Array, w: Weights, at: str, c: ViTConfig, head: int, grid: tuple[int, int]) -> Array:
    """What position biases add to the logits of one head: [T, T]."""
    t, (rows, columns) = len(q), grid
    prefix = t - rows * columns
    out = np.zeros((t, t))
    for i in range(t):
        for j in range(t):
            if i < prefix or j < prefix:
                out[i, j] = w[f"{at}.table"][-1 if i < prefix and j < prefix else -3 if i < prefix else -2, head]
                continue
            (r, s), (k, m) = divmod(i - prefix, columns), divmod(j - prefix, columns)
            down, along = r - k + rows - 1, s - m + columns - 1
            if c.position_bias == "decomposed":
                out[i, j] = q[i] @ (w[f"{at}.rows"][down] + w[f"{at}.columns"][along])
            else:
                out[i, j] = w[f"{at}.table"][down * (2 * columns - 1) + along, head]
    return out


def attend(
    z: Array, w: Weights, at: str, c: ViTConfig, offsets: Array | None, layer: int, grid: tuple[int, int]
) -> Array:
    """MSA(z), Eqs. 5-8: [T, D] -> [T, D]."""
    t, size, width, name = len(z), c.head_size, c.attention_width, f"{at}.attention"
    qkv = z @ w[f"{name}.qkv.weight"].T
    if (b := w.get(f"{name}.qkv.bias")) is not None:
        qkv = qkv + (b if c.key_bias else np.concatenate([b[:width], np.zeros(width), b[width:]]))
    heads: list[Array] = []
    for head in range(c.heads):
        q, k, v = (qkv[:, part * width + head * size : part * width + (head + 1) * size] for part in range(3))
        q, k = norm_at(q, w, f"{name}.norm_q", c), norm_at(k, w, f"{name}.norm_k", c)
        if c.rotary is not None:
            q, k = turn(q, w, c, layer, head), turn(k, w, c, layer, head)
        logits = q @ k.T / math.sqrt(size)
        if offsets is not None:
            more = np.array([[q[i] @ offsets[i - j + t - 1] for j in range(t)] for i in range(t)])
            logits = logits + more / math.sqrt(size)
        if c.position_bias != "none":
            where = "position_bias" if c.position_bias == "shared-table" else f"{at}.position_bias"
            logits = logits + bias(q, w, where, c, head, grid)
        heads.append(softmax(logits) @ v)
    return linear(norm_at(np.concatenate(heads, axis=1), w, f"{name}.norm", c), w, f"{name}.out")


def attend_windows(z: Array, w: Weights, at: str, c: ViTConfig, layer: int, side: int) -> Array:
    """Each window by itself; where the grid ends within one, zeros stand in for the rest."""
    (rows, columns), out = c.grid, np.empty_like(z)
    grid, mixed = z.reshape(rows, columns, -1), out.reshape(rows, columns, -1)
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            part = grid[top : top + side, left : left + side]
            window = np.zeros((side, side, c.width))
            window[: part.shape[0], : part.shape[1]] = part
            got = attend(window.reshape(side * side, -1), w, at, c, None, layer, (side, side))
            got = got.reshape(side, side, -1)[: part.shape[0], : part.shape[1]]
            mixed[top : top + side, left : left + side] = got
    return out


def mlp(z: Array, w: Weights, at: str, c: ViTConfig, drop: Callable[[Array], Array]) -> Array:
    hidden = linear(z, w, f"{at}.expand")
    if c.gated:
        gate, value = np.split(hidden, 2, axis=-1)
        hidden = gate / (1 + np.exp(-gate)) * value
    else:
        hidden = gelu(hidden, c.gelu)
    return linear(norm_at(drop(hidden), w, f"{at}.norm", c), w, f"{at}.contract")


def layer_of(
    z: Array, w: Weights, at: str, c: ViTConfig, offsets: Array | None, drop: Callable[[Array], Array], layer: int = 0
) -> Array:
    def mix(z: Array) -> Array:
        if side := c.window_of(layer):
            return drop(attend_windows(z, w, at, c, layer, side))
        return drop(attend(z, w, at, c, offsets, layer, c.grid))

    def scale(z: Array, name: str) -> Array:
        return z * w.get(f"{at}.{name}.gamma", 1)

    def norm_of(z: Array, name: str) -> Array:
        return norm_at(z, w, f"{at}.{name}", c)

    if c.norm_order == "res-post":
        z = z + scale(norm_of(mix(z), "norm_attention"), "scale_attention")
        return z + scale(norm_of(drop(mlp(z, w, f"{at}.mlp", c, drop)), "norm_mlp"), "scale_mlp")
    z = z + scale(mix(norm_of(z, "norm_attention")), "scale_attention")  # Eq. 2
    return z + scale(drop(mlp(norm_of(z, "norm_mlp"), w, f"{at}.mlp", c, drop)), "scale_mlp")  # Eq. 3


def axial_layer(z: Array, w: Weights, at: str, c: ViTConfig, drop: Callable[[Array], Array]) -> Array:
    rows, columns = c.grid
    grid = z.reshape(rows, columns, -1)
    grid = np.stack([layer_of(grid[r], w, f"{at}.row", c, None, drop) for r in range(rows)])
    grid = np.stack([layer_of(grid[:, s], w, f"{at}.column", c, None, drop) for s in range(columns)], axis=1)
    return grid.reshape(rows * columns, -1)


def vit(image: Array, w: Weights, c: ViTConfig, drop: Callable[[Array], Array] = lambda x: x) -> tuple[Array, Array]:
    """One image [C, H, W] to all tokens z_L and to the network's output; `drop` stands where dropout does."""
    z = embed(image, w, c)
    if c.norm_stem == "patches":
        z = norm_at(z, w, "norm_stem", c)
    if c.registers:
        z = np.concatenate([w["registers"][0], z])
    if c.class_token:
        z = np.concatenate([w["class_token"][0], z])
    for layer in range(c.depth):
        if (add := table(w, c, layer)) is not None:
            z = z + add  # Eq. 1
        if layer == 0:
            z = drop(norm_at(z, w, "norm_stem", c) if c.norm_stem == "tokens" else z)
        offsets = None
        if c.position == "relative" and not (c.placement == "stem" and layer):
            offsets = w[f"position.tables.{0 if c.placement in ('stem', 'shared') else layer}.table"]
        if c.attention == "axial":
            z = axial_layer(z, w, f"blocks.{layer}", c, drop)
        else:
            z = layer_of(z, w, f"blocks.{layer}", c, offsets, drop, layer)
    return z, classify(z, w, c)


def classify(z: Array, w: Weights, c: ViTConfig) -> Array:
    """Eq. 4 and the head."""
    normed = norm_at(z, w, "norm", c)
    patches = normed[c.prefix :]
    if c.neck:
        patches = neck(patches.reshape(*c.grid, -1), w).reshape(c.patches, -1)
    if c.head == "patches":
        return bilinear(linear(patches, w, "head.classifier").reshape(*c.grid, -1), c.image).transpose(2, 0, 1)
    if c.head == "distilled":
        return (linear(normed[0], w, "head.classifier") + linear(normed[1], w, "head.distilled")) / 2
    token, mean = normed[: c.class_tokens].mean(axis=0), patches.mean(axis=0)
    if c.norm_after_pool:
        mean = norm_at(z[c.prefix :].mean(axis=0), w, "norm", c)
    parts: dict[str, Callable[[], Array]] = {
        "token": lambda: token,
        "mean": lambda: mean,
        "token+mean": lambda: np.concatenate([token, mean]),
        "map": lambda: map_pool(normed, w, c),
    }
    y = parts[c.pool]()
    if c.projection:
        y = linear(y, w, "projection")
    if c.head == "tanh":
        y = np.tanh(linear(y, w, "head.hidden"))
    return linear(y, w, "head.classifier") if c.classes else y


def map_pool(z: Array, w: Weights, c: ViTConfig) -> Array:
    """One learned query looks at all tokens, or at the patches: [T, D] -> [D]."""
    z = z if c.map_prefix else z[c.prefix :]
    query, at, heads = w["map_pool.query"][0, 0], "map_pool", c.map_heads or c.heads
    full = c.map_style == "siglip"
    q = linear(query, w, f"{at}.q") if full else query
    k, v = np.split(linear(z, w, f"{at}.kv"), 2, axis=-1)
    size = c.width // heads
    each = [slice(head * size, (head + 1) * size) for head in range(heads)]
    y = linear(np.concatenate([softmax(k[:, h] @ q[h] / math.sqrt(size)) @ v[:, h] for h in each]), w, f"{at}.out")
    if not full:
        return y
    hidden = gelu(linear(norm_at(y, w, f"{at}.norm", c), w, f"{at}.mlp.expand"), c.gelu)
    return y + linear(hidden, w, f"{at}.mlp.contract")


def neck(grid: Array, w: Weights) -> Array:
    """A 1x1 and a 3x3 convolution, each with a norm: [rows, columns, D] -> [rows, columns, C]."""

    def norm_of(x: Array, name: str) -> Array:
        return norm(x, w[f"neck.{name}.weight"], w[f"neck.{name}.bias"], 1e-6)

    narrow = norm_of(grid @ w["neck.reduce.weight"][:, :, 0, 0].T, "norm_reduce")
    wide, kernel = np.pad(narrow, ((1, 1), (1, 1), (0, 0))), w["neck.smooth.weight"]
    out = np.zeros_like(narrow)
    for r, s in np.ndindex(3, 3):
        out += wide[r : r + grid.shape[0], s : s + grid.shape[1]] @ kernel[:, :, r, s].T
    return norm_of(out, "norm_smooth")


def bilinear(grid: Array, size: tuple[int, int]) -> Array:
    """Rows and columns of vectors at the centres of so many pixels; beyond the outermost centres nothing changes."""
    out = np.empty((*size, grid.shape[2]))
    for at in np.ndindex(*size):
        spots = [(at[i] + 0.5) * grid.shape[i] / size[i] - 0.5 for i in range(2)]
        out[at] = between(grid, *(min(max(spot, 0), grid.shape[i] - 1) for i, spot in enumerate(spots)))
    return out


def between(grid: Array, row: float, column: float) -> Array:
    """The vector at a place between four of a grid."""
    top, left = int(row), int(column)
    bottom, right = min(top + 1, grid.shape[0] - 1), min(left + 1, grid.shape[1] - 1)
    down, along = row - top, column - left
    upper = (1 - along) * grid[top, left] + along * grid[top, right]
    lower = (1 - along) * grid[bottom, left] + along * grid[bottom, right]
    return (1 - down) * upper + down * lower
