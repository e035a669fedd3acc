"""The Vision Transformer once more, in numpy and float64, one equation a line: what the module is compared with."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.models.vit_config import ViTConfig

Array = NDArray[np.float64]


def arrays(tensors: dict[str, Tensor]) -> dict[str, Array]:
    return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


def norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * scale + bias


def gelu(x: Array, form: str) -> Array:
    if form == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def embed(image: Array, w: dict[str, Array], c: ViTConfig) -> Array:
    """x_p E: patches in raster order, each flattened as (row, column, channel)."""
    ph, pw = c.patch
    e = w["embedding.projection.weight"].transpose(2, 3, 1, 0).reshape(-1, c.width)
    patches = [
        image[:, r * ph : (r + 1) * ph, s * pw : (s + 1) * pw].transpose(1, 2, 0).reshape(-1)
        for r in range(c.image[0] // ph)
        for s in range(c.image[1] // pw)
    ]
    return np.stack(patches) @ e + w["embedding.projection.bias"]


def table(w: dict[str, Array], c: ViTConfig, layer: int) -> Array | None:
    """What positions add to the tokens at the input of a layer: [T, D], or nothing."""
    placement = c.placement or "stem"
    if c.position in ("none", "relative") or (placement == "stem" and layer):
        return None
    at = f"position.tables.{layer if placement == 'every' else 0}"
    rows, columns = c.grid
    has_row = c.class_token and c.position_prefix
    out = np.zeros((c.tokens, c.width))
    for r in range(rows):
        for s in range(columns):
            n = r * columns + s
            match c.position:
                case "learned":
                    vector = w[f"{at}.table"][0, n + has_row]
                case "learned2d":
                    vector = np.concatenate([w[f"{at}.columns"][s], w[f"{at}.rows"][r]])
                case "learned2d-sum":
                    vector = w[f"{at}.columns"][s] + w[f"{at}.rows"][r]
                case _:
                    vector = sine(r, s, c.width)
            out[c.prefix + n] = vector
    if has_row and c.position != "sincos2d":
        out[0] = w[f"{at}.table"][0, 0] if c.position == "learned" else w[f"{at}.prefix"][0, 0]
    return out


def sine(row: int, column: int, width: int) -> Array:
    rates = [10_000 ** (-i / (width // 4 - 1)) for i in range(width // 4)]
    return np.array([f(p * rate) for p in (column, row) for f in (math.sin, math.cos) for rate in rates])


def attend(z: Array, w: dict[str, Array], at: str, c: ViTConfig, offsets: Array | None) -> Array:
    """MSA(z), Eqs. 5-8: [T, D] -> [T, D]."""
    t, d = z.shape
    size = d // c.heads
    qkv = z @ w[f"{at}.qkv.weight"].T + w.get(f"{at}.qkv.bias", 0)
    heads: list[Array] = []
    for head in range(c.heads):
        q, k, v = (qkv[:, part * d + head * size : part * d + (head + 1) * size] for part in range(3))
        logits = q @ k.T
        if offsets is not None:
            logits = logits + np.array([[q[i] @ offsets[i - j + t - 1] for j in range(t)] for i in range(t)])
        heads.append(softmax(logits / math.sqrt(size)) @ v)
    return np.concatenate(heads, axis=1) @ w[f"{at}.out.weight"].T + w[f"{at}.out.bias"]


def layer_of(
    z: Array, w: dict[str, Array], at: str, c: ViTConfig, offsets: Array | None, drop: Callable[[Array], Array]
) -> Array:
    def norm_of(z: Array, name: str) -> Array:
        return norm(z, w[f"{at}.{name}.weight"], w[f"{at}.{name}.bias"], c.norm_eps)

    z = z + drop(attend(norm_of(z, "norm_attention"), w, f"{at}.attention", c, offsets))  # Eq. 2
    hidden = norm_of(z, "norm_mlp") @ w[f"{at}.mlp.expand.weight"].T + w[f"{at}.mlp.expand.bias"]
    hidden = drop(gelu(hidden, c.gelu))
    return z + drop(hidden @ w[f"{at}.mlp.contract.weight"].T + w[f"{at}.mlp.contract.bias"])  # Eq. 3


def axial_layer(z: Array, w: dict[str, Array], at: str, c: ViTConfig, drop: Callable[[Array], Array]) -> Array:
    rows, columns = c.grid
    grid = z.reshape(rows, columns, -1)
    grid = np.stack([layer_of(grid[r], w, f"{at}.row", c, None, drop) for r in range(rows)])
    grid = np.stack([layer_of(grid[:, s], w, f"{at}.column", c, None, drop) for s in range(columns)], axis=1)
    return grid.reshape(rows * columns, -1)


def vit(
    image: Array, w: dict[str, Array], c: ViTConfig, drop: Callable[[Array], Array] = lambda x: x
) -> tuple[Array, Array]:
    """One image [C, H, W] to all tokens z_L and to the network's output; `drop` stands where dropout does."""
    z = embed(image, w, c)
    if c.registers:
        z = np.concatenate([w["registers"][0], z])
    if c.class_token:
        z = np.concatenate([w["class_token"][0], z])
    for layer in range(c.depth):
        if (add := table(w, c, layer)) is not None:
            z = z + add  # Eq. 1
        if layer == 0:
            z = drop(z)
        offsets = None
        if c.position == "relative" and not (c.placement == "stem" and layer):
            offsets = w[f"position.tables.{0 if c.placement in ('stem', 'shared') else layer}.table"]
        if c.attention == "axial":
            z = axial_layer(z, w, f"blocks.{layer}", c, drop)
        else:
            z = layer_of(z, w, f"blocks.{layer}", c, offsets, drop)
    return z, classify(z, w, c)


def classify(z: Array, w: dict[str, Array], c: ViTConfig) -> Array:
    """Eq. 4 and the head."""
    normed = norm(z, w["norm.weight"], w["norm.bias"], c.norm_eps)
    if c.head == "patches":
        logits = normed[c.prefix :] @ w["head.classifier.weight"].T + w["head.classifier.bias"]
        return bilinear(logits.reshape(*c.grid, -1), c.image).transpose(2, 0, 1)
    if c.pool == "token":
        y = normed[0]
    elif c.norm_after_pool:
        y = norm(z[c.prefix :].mean(axis=0), w["norm.weight"], w["norm.bias"], c.norm_eps)
    else:
        y = normed[c.prefix :].mean(axis=0)
    if c.head == "tanh":
        y = np.tanh(y @ w["head.hidden.weight"].T + w["head.hidden.bias"])
    if c.classes:
        y = y @ w["head.classifier.weight"].T + w["head.classifier.bias"]
    return y


def bilinear(grid: Array, size: tuple[int, int]) -> Array:
    """Rows and columns of vectors at the centres of so many pixels; beyond the outermost centres nothing changes."""
    out = np.empty((*size, grid.shape[2]))
    for at in np.ndindex(*size):
        spots = [(at[i] + 0.5) * grid.shape[i] / size[i] - 0.5 for i in range(2)]
        spots = [min(max(spot, 0), grid.shape[i] - 1) for i, spot in enumerate(spots)]
        top, left = map(int, spots)
        bottom, right = min(top + 1, grid.shape[0] - 1), min(left + 1, grid.shape[1] - 1)
        down, along = spots[0] - top, spots[1] - left
        upper = (1 - along) * grid[top, left] + along * grid[top, right]
        lower = (1 - along) * grid[bottom, left] + along * grid[bottom, right]
        out[at] = (1 - down) * upper + down * lower
    return out
