"""3.2: positions at a new resolution, against scipy's zoom and against loops."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.tiny import VIT, awake, images
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.models.build import build, build_from
from vitrail.models.positions.embeddings import resize_position, resize_positions
from vitrail.models.resampling.interpolation import resample_grid, resize_grid
from vitrail.models.vit import ViT
from vitrail.models.vit_config import Numerics, ViTConfig

ALL: tuple[Numerics, ...] = ("reference", "bilinear", "bicubic")
sides = st.integers(1, 12)
pairs = st.tuples(sides, sides)
steady = settings(deadline=None, derandomize=True, max_examples=25)


def grid_of(size: tuple[int, int], width: int = 3, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(*size, width)))


def zoomed(grid: Tensor, size: tuple[int, int]) -> np.ndarray:
    """What the reference code does."""
    rows, columns, _ = grid.shape
    return scipy.ndimage.zoom(grid.numpy(), (size[0] / rows, size[1] / columns, 1), order=1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((14, 14), (24, 24)),
        ((24, 24), (14, 14)),
        ((7, 7), (12, 12)),
        ((16, 16), (37, 37)),
        ((14, 14), (24, 32)),
        ((6, 9), (13, 4)),
        ((3, 8), (8, 3)),
        ((5, 5), (5, 9)),
        ((4, 6), (1, 1)),
        ((2, 2), (31, 3)),
    ],
)
def test_reference_is_scipys_zoom(old: tuple[int, int], new: tuple[int, int]) -> None:
    grid = grid_of(old)
    got = resize_grid(grid, new)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), zoomed(grid, new), atol=1e-6, rtol=0)


@given(old=pairs, new=pairs)
@steady
def test_reference_is_scipys_zoom_for_any_size(old: tuple[int, int], new: tuple[int, int]) -> None:
    np.testing.assert_allclose(resize_grid(grid_of(old), new).numpy(), zoomed(grid_of(old), new), atol=1e-6, rtol=0)


def taps(old: int, new: int, numerics: Numerics) -> np.ndarray:
    """Interpolation along one axis as a matrix [new, old], from the definitions."""
    matrix = np.zeros((new, old))
    for i in range(new):
        if numerics == "reference":
            at, reach = (i * (old - 1) / (new - 1) if new > 1 else 0.0), 1.0
        else:
            at, reach = (i + 0.5) * old / new - 0.5, 1.0
        if numerics == "bicubic":  # the kernel is widened where the grid shrinks, cut at the edge, and made to sum to 1
            reach = max(old / new, 1.0)
            weights = np.array([cubic((j - at) / reach) for j in range(old)])
            matrix[i] = weights / weights.sum()
        else:
            at = min(max(at, 0.0), old - 1)
            for j in range(old):
                matrix[i, j] = max(0.0, 1 - abs(j - at))
    return matrix


def cubic(x: float, a: float = -0.5) -> float:
    """Keys' cubic convolution."""
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


@pytest.mark.parametrize("numerics", ALL)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((14, 14), (24, 24)),
        ((24, 24), (14, 14)),
        ((6, 9), (13, 4)),
        ((7, 5), (5, 7)),
        ((4, 4), (1, 2)),
        ((4, 4), (2, 1)),
    ],
)
def test_each_numerics_against_its_definition(numerics: Numerics, old: tuple[int, int], new: tuple[int, int]) -> None:
    grid = grid_of(old)
    expected = np.einsum("ir,js,rsd->ijd", taps(old[0], new[0], numerics), taps(old[1], new[1], numerics), grid.numpy())
    np.testing.assert_allclose(resize_grid(grid, new, numerics).numpy(), expected, atol=1e-6, rtol=0)


TORCHS: dict[Numerics, dict[str, Any]] = {
    "bilinear": {"mode": "bilinear"},
    "bilinear-antialias": {"mode": "bilinear", "antialias": True},
    "bicubic": {"mode": "bicubic", "antialias": True},
    "bicubic-sharp": {"mode": "bicubic"},
    "bicubic-offset": {"mode": "bicubic"},
}


@pytest.mark.parametrize("numerics", TORCHS)
@pytest.mark.parametrize(
    ("old", "new"), [((14, 14), (24, 32)), ((24, 24), (14, 9)), ((7, 5), (5, 7)), ((5, 5), (5, 9)), ((4, 4), (3, 2))]
)
def test_what_other_libraries_do_with_torch(numerics: Numerics, old: tuple[int, int], new: tuple[int, int]) -> None:
    """Meta's code for DINOv2 gives torch a factor, 0.1 patches too large, in place of the size."""
    grid = grid_of(old)
    scale = tuple((after + 0.1) / before for before, after in zip(old, new, strict=True))
    size = {"scale_factor": scale} if numerics == "bicubic-offset" else {"size": new}
    wanted = torch.nn.functional.interpolate(grid.permute(2, 0, 1)[None], **size, **TORCHS[numerics])
    torch.testing.assert_close(resize_grid(grid, new, numerics), wanted[0].permute(1, 2, 0), atol=1e-9, rtol=0)
    own = resample_grid(grid, old, numerics)
    assert torch.equal(own, grid)


def test_the_three_numerics_differ() -> None:
    grid = grid_of((7, 7))
    a, b, c = (resize_grid(grid, (12, 12), numerics) for numerics in ALL)
    assert min((a - b).abs().max(), (b - c).abs().max(), (a - c).abs().max()) > 0.05


@given(old=pairs, new=pairs, numerics=st.sampled_from(ALL))
@steady
def test_constant_grids_stay_constant(old: tuple[int, int], new: tuple[int, int], numerics: Numerics) -> None:
    grid = torch.full((*old, 2), 0.37, dtype=torch.float64)
    torch.testing.assert_close(
        resize_grid(grid, new, numerics), torch.full((*new, 2), 0.37, dtype=torch.float64), atol=1e-12, rtol=0
    )


@given(old=pairs, new=pairs, numerics=st.sampled_from(ALL))
@steady
def test_resizing_is_linear_and_keeps_axes_apart(
    old: tuple[int, int], new: tuple[int, int], numerics: Numerics
) -> None:
    a, b = grid_of(old, seed=1), grid_of(old, seed=2)
    together = resize_grid(2 * a - b, new, numerics)
    apart = 2 * resize_grid(a, new, numerics) - resize_grid(b, new, numerics)
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=0)
    turned = resize_grid(a.transpose(0, 1), (new[1], new[0]), numerics).transpose(0, 1)
    torch.testing.assert_close(turned, resize_grid(a, new, numerics), atol=1e-12, rtol=0)


@given(old=st.tuples(st.integers(2, 12), st.integers(2, 12)), new=st.tuples(st.integers(2, 12), st.integers(2, 12)))
@steady
def test_reference_keeps_corners_and_planes(old: tuple[int, int], new: tuple[int, int]) -> None:
    grid = grid_of(old)
    got = resize_grid(grid, new)
    for r, c in [(0, 0), (0, -1), (-1, 0), (-1, -1)]:
        torch.testing.assert_close(got[r, c], grid[r, c], atol=1e-12, rtol=0)
    plane = torch.linspace(0, 1, old[0], dtype=torch.float64)[:, None] + torch.linspace(0, 3, old[1])[None]
    wanted = torch.linspace(0, 1, new[0], dtype=torch.float64)[:, None] + torch.linspace(0, 3, new[1])[None]
    torch.testing.assert_close(resize_grid(plane[..., None], new)[..., 0], wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("numerics", ALL)
def test_the_same_size_is_the_same_tensor(numerics: Numerics) -> None:
    grid, table = grid_of((3, 4)), torch.randn(1, 13, 5)
    assert resize_grid(grid, (3, 4), numerics) is grid
    assert resize_position(table, (3, 4), (3, 4), numerics) is table
    tensors = {"position.tables.0.table": table}
    assert resize_positions(tensors, VIT, VIT, numerics) is tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_work_is_in_float64_and_the_result_in_the_tables_type(dtype: torch.dtype) -> None:
    grid = grid_of((7, 7)).to(dtype)
    got = resize_grid(grid, (12, 12))
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(got, resize_grid(grid.double(), (12, 12)).to(dtype))


def test_unknown_numerics_name_the_known() -> None:
    with pytest.raises(UnknownName, match="did you mean bicubic"):
        resize_grid(grid_of((3, 4)), (3, 4), "bicubik")  # even where there is nothing to do


# Tables.


@pytest.mark.parametrize("leading", [(), (1,)])
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("numerics", ALL)
def test_rows_before_the_grid_are_left_alone(leading: tuple[int, ...], prefix: int, numerics: Numerics) -> None:
    table = torch.randn(*leading, prefix + 12, 5)
    got = resize_position(table, (3, 4), (5, 6), numerics)
    assert got.shape == (*leading, prefix + 30, 5)
    assert torch.equal(got[..., :prefix, :], table[..., :prefix, :])
    grid = table.reshape(-1, 5)[prefix:].reshape(3, 4, 5)
    assert torch.equal(got.reshape(-1, 5)[prefix:].reshape(5, 6, 5), resize_grid(grid, (5, 6), numerics))


def test_a_table_shorter_than_its_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="table of 11 positions is too short for a grid of 3x4"):
        resize_position(torch.zeros(1, 11, 5), (3, 4), (5, 6))


# Whole networks.


def moved(changes: dict[str, Any], image: tuple[int, int], numerics: Numerics = "reference") -> tuple[ViT, ViT]:
    """A network and the same one for images of another size."""
    old = replace(VIT, **changes)
    new = replace(old, image=image)
    model = awake(old)
    again = build_from(new, resize_positions(model.state_dict(), old, new, numerics)).eval()
    assert isinstance(model, ViT)
    assert isinstance(again, ViT)
    return model, again


def grid_part(model: ViT, layer: int) -> Tensor:
    config = model.config
    zero = torch.zeros(1, config.tokens, config.width, dtype=torch.float64)
    return model.position(zero, layer)[0, config.prefix :].detach().unflatten(0, config.grid)


@pytest.mark.parametrize("placement", ["stem", "every", "shared"])
@pytest.mark.parametrize("kind", ["learned", "learned2d", "learned2d-sum"])
@pytest.mark.parametrize("tokens", [{}, {"registers": 2}, {"position_prefix": False}], ids=str)
def test_every_kind_is_resized_as_its_grid(kind: str, placement: str, tokens: dict[str, Any]) -> None:
    """Two 1-D tables resized one by one make the grid that resizing their joint grid makes."""
    model, again = moved({"position": kind, "placement": placement, **tokens}, (10, 9))
    assert again.config.grid == (5, 3)
    for layer in range(2):
        expected = resize_grid(grid_part(model, layer), (5, 3))
        torch.testing.assert_close(grid_part(again, layer), expected, atol=1e-12, rtol=0)
    changed = {name for name, t in again.state_dict().items() if not torch.equal(t, model.state_dict()[name])}
    assert changed
    assert all(name.startswith("position.tables.") and not name.endswith("prefix") for name in changed)
    assert again(images(again.config)).shape == (2, 5)


@pytest.mark.parametrize("numerics", ALL)
@pytest.mark.parametrize("kind", ["learned2d", "learned2d-sum"])
def test_rows_and_columns_are_resized_alike(kind: str, numerics: Numerics) -> None:
    old = replace(VIT, position=kind, image=(8, 12))
    vectors = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3)))
    tensors = {"position.tables.0.rows": vectors, "position.tables.0.columns": vectors}
    out = resize_positions(tensors, old, replace(old, image=(14, 21)), numerics)
    expected = taps(4, 7, numerics) @ vectors.numpy()
    np.testing.assert_allclose(out["position.tables.0.columns"].numpy(), expected, atol=1e-6, rtol=0)
    np.testing.assert_allclose(out["position.tables.0.rows"].numpy(), expected, atol=1e-6, rtol=0)


def test_sine_positions_are_made_anew() -> None:
    model, again = moved({"position": "sincos2d"}, (10, 9))
    torch.testing.assert_close(grid_part(again, 0)[:3, :3], grid_part(model, 0)[:3, :3], atol=1e-6, rtol=0)


def test_class_tokens_position_is_untouched() -> None:
    for kind, name in [("learned", "table"), ("learned2d", "prefix"), ("learned2d-sum", "prefix")]:
        model, again = moved({"position": kind}, (10, 9), "bicubic")
        before, after = (getattr(m.position.tables[0], name)[0, 0] for m in (model, again))
        assert torch.equal(before, after)


def test_relative_positions_are_refused() -> None:
    old = replace(VIT, position="relative")
    with pytest.raises(ConfigError, match=r"relative positions .* 3x4 grid .* keep image_size=6x12"):
        resize_positions(build(old).state_dict(), old, replace(old, image=(10, 9)))
    tensors = build(old).state_dict()
    assert resize_positions(tensors, old, old) is tensors


def test_constant_pictures_keep_their_answer_at_a_new_size() -> None:
    """Without positions only the number of equal tokens changes, so mean pooling answers the same."""
    model, again = moved({"position": "none", "class_token": False, "pool": "mean"}, (10, 9))
    small, large = (torch.full((1, 3, *m.config.image), 0.4, dtype=torch.float64) for m in (model, again))
    torch.testing.assert_close(model(small), again(large), atol=1e-12, rtol=0)


def test_published_fine_tuning_size() -> None:
    """ViT-B/16 from 224 to 384: 197 positions become 577."""
    old = ViTConfig(width=8, depth=1, mlp_width=8, heads=1)
    new = replace(old, image=(384, 384))
    table = torch.randn(1, 197, 8)
    out = resize_positions({"position.tables.0.table": table, "norm.weight": table}, old, new)
    assert out["position.tables.0.table"].shape == (1, 577, 8)
    assert out["norm.weight"] is table
    assert math.isclose(out["position.tables.0.table"][0, -1, 0].item(), table[0, -1, 0].item(), rel_tol=1e-6)
