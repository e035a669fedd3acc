"""BiT's unit and the hybrid's unit against hand-written ones, their stems, and AxialResNet's mixing."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.tiny import BACKBONE, RESNET, awake, images
from vitrail.core.errors import ImageSizeError
from vitrail.models.attention import relative_logits
from vitrail.models.resnet import AxialMixing, PostActivationUnit, PreActivationUnit, ResNet, Trunk, Unit
from vitrail.models.resnet_config import ResNetConfig

SMALL_EPS = {"bit": 1e-5, "hybrid": 1e-6}


def resnet(config: ResNetConfig) -> ResNet:
    model = awake(config)
    assert isinstance(model, ResNet)
    return model


def conv(x: Tensor, w: Tensor, c: ResNetConfig, stride: int = 1) -> Tensor:
    """A convolution with the kernel standardised and the image padded by hand."""
    side = w.shape[-1]
    mean = w.flatten(1).mean(dim=1).reshape(-1, 1, 1, 1)
    variance = ((w - mean) ** 2).flatten(1).mean(dim=1).reshape(-1, 1, 1, 1)
    eps = c.standardisation_eps
    scale = variance.sqrt() + eps if c.standardisation == "std+eps" else (variance + eps).sqrt()
    pads: list[int] = []
    for n in (x.shape[3], x.shape[2]):
        if c.padding == "symmetric":
            pads += [side // 2, side // 2]
        else:
            total = max((math.ceil(n / stride) - 1) * stride + side - n, 0)
            pads += [total // 2, total - total // 2]
    return F.conv2d(F.pad(x, pads), (w - mean) / scale, stride=stride)


def norm(x: Tensor, w: dict[str, Tensor], name: str, c: ResNetConfig) -> Tensor:
    b, channels, height, width = x.shape
    groups = x.reshape(b, c.groups, -1)
    mean = groups.mean(dim=2, keepdim=True)
    variance = ((groups - mean) ** 2).mean(dim=2, keepdim=True)
    out = ((groups - mean) / (variance + c.norm_eps).sqrt()).reshape(b, channels, height, width)
    return out * w[f"{name}.weight"].reshape(1, -1, 1, 1) + w[f"{name}.bias"].reshape(1, -1, 1, 1)


def bit_unit(x: Tensor, w: dict[str, Tensor], c: ResNetConfig, stride: int) -> Tensor:
    out = norm(x, w, "norm1", c).clamp(min=0)
    shortcut = conv(out, w["project.weight"], c, stride) if "project.weight" in w else x
    out = conv(out, w["conv1.weight"], c)
    out = conv(norm(out, w, "norm2", c).clamp(min=0), w["conv2.weight"], c, stride)
    return shortcut + conv(norm(out, w, "norm3", c).clamp(min=0), w["conv3.weight"], c)


def hybrid_unit(x: Tensor, w: dict[str, Tensor], c: ResNetConfig, stride: int) -> Tensor:
    shortcut = x
    if "project.weight" in w:
        shortcut = norm(conv(x, w["project.weight"], c, stride), w, "norm_project", c)
    out = norm(conv(x, w["conv1.weight"], c), w, "norm1", c).clamp(min=0)
    out = norm(conv(out, w["conv2.weight"], c, stride), w, "norm2", c).clamp(min=0)
    return (shortcut + norm(conv(out, w["conv3.weight"], c), w, "norm3", c)).clamp(min=0)


FORMS = {
    "bit": (RESNET, PreActivationUnit, bit_unit),
    "hybrid": (BACKBONE, PostActivationUnit, hybrid_unit),
}


@pytest.mark.parametrize("size", [(5, 7), (6, 4)])
@pytest.mark.parametrize(
    ("stage", "block", "stride", "projected"), [(0, 0, 1, True), (1, 0, 2, True), (1, 1, 1, False)]
)
@pytest.mark.parametrize("form", FORMS)
def test_unit_against_a_hand_written_one(
    form: str, stage: int, block: int, stride: int, projected: bool, size: tuple[int, int]
) -> None:
    config, kind, slow = FORMS[form]
    unit = resnet(config).trunk.stages[stage][block]
    assert isinstance(unit, Unit)
    assert type(unit) is kind
    assert (unit.project is not None) == projected
    x = torch.randn(2, unit.conv1.in_channels, *size, dtype=torch.float64)
    with torch.no_grad():
        got, expected = unit(x), slow(x, unit.state_dict(), config, stride)
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=0)
    assert got.shape[2:] == (math.ceil(size[0] / stride), math.ceil(size[1] / stride))


@pytest.mark.parametrize("form", FORMS)
def test_trunk_is_stem_and_stages(form: str) -> None:
    config, _, slow = FORMS[form]
    trunk = resnet(config).trunk
    w = trunk.state_dict()
    x = images(config)
    out = conv(x, w["root.weight"], config, 2)
    if form == "hybrid":
        out = F.max_pool2d(F.pad(norm(out, w, "norm_root", config).clamp(min=0), (0, 1, 0, 1)), 3, 2)
    else:
        out = F.max_pool2d(F.pad(out, (1, 1, 1, 1)), 3, 2)
    torch.testing.assert_close(trunk.stem(x), out, atol=1e-11, rtol=0)
    for stage, units in enumerate(trunk.stages):
        for block, unit in enumerate(units):
            out = slow(out, unit.state_dict(), config, 2 if stage and not block else 1)
    torch.testing.assert_close(trunk(x), out, atol=1e-10, rtol=0)
    assert out.shape == (2, config.features, *config.grid)


def test_bit_ends_in_norm_and_relu_and_the_hybrid_does_not() -> None:
    model, x = resnet(RESNET), images(RESNET)
    expected = norm(model.trunk(x), dict(model.named_parameters()), "norm", RESNET).clamp(min=0)
    torch.testing.assert_close(model.forward_features(x), expected, atol=1e-11, rtol=0)
    post = resnet(replace(BACKBONE, classes=5))
    assert post.norm is None
    assert torch.equal(post.forward_features(x), post.trunk(x))


def test_pool_padding_matters_in_bit() -> None:
    """Nothing stands between root and pool, so a zero at the edge can win where every value is negative."""
    zero, infinity = resnet(RESNET), resnet(replace(RESNET, pool_padding="infinity"))
    infinity.load_state_dict(zero.state_dict())
    x = images(RESNET)
    inner = zero.trunk.stem(x)[..., 1:, 1:]
    assert torch.equal(inner, infinity.trunk.stem(x)[..., 1:, 1:])
    assert (zero.trunk.stem(x) - infinity.trunk.stem(x)).abs().max() > 0.01
    assert (zero(x) - infinity(x)).abs().max() > 1e-4


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-1])
@pytest.mark.parametrize("form", FORMS)
def test_norm_eps_is_the_configs_everywhere(form: str, eps: float) -> None:
    config = replace(FORMS[form][0], norm_eps=eps)
    norms = [m for m in resnet(config).modules() if isinstance(m, torch.nn.GroupNorm)]
    assert {(norm.eps, norm.num_groups) for norm in norms} == {(eps, config.groups)}
    faint = 1e-3 * torch.randn(1, norms[0].num_channels, 3, 3, dtype=torch.float64)
    weights = {f"n.{name}": tensor for name, tensor in norms[0].state_dict().items()}
    torch.testing.assert_close(norms[0](faint), norm(faint, weights, "n", config), atol=1e-12, rtol=0)


def test_fresh_hybrid_units_pass_their_shortcut_on() -> None:
    """The third norm starts at scale zero, so a fresh unit is the ReLU of its shortcut."""
    trunk = Trunk(BACKBONE).double()
    for module in trunk.modules():
        if isinstance(module, PostActivationUnit):
            module.initialise()
    unit = trunk.stages[1][1]
    x = torch.randn(1, 64, 4, 4, dtype=torch.float64)
    assert torch.equal(unit(x), x.relu())


@pytest.mark.parametrize("stride", [1, 2])
def test_axial_mixing_is_row_attention_then_column_attention_then_the_stride(stride: int) -> None:
    grid = (3, 5)
    mixing = AxialMixing(8, 2, grid, stride).double()
    with torch.no_grad():
        for parameter in mixing.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 8, *grid, dtype=torch.float64)

    def attend(line: Tensor, attention: torch.nn.Module, offsets: Tensor) -> Tensor:
        q, k, v = attention.project(line)
        weights = (q @ k.transpose(-2, -1) / 2 + relative_logits(q, offsets)).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ attention.out.weight.T

    with torch.no_grad():
        got = mixing(x)
        for r in range(3):
            x[:, :, r] = attend(x[:, :, r].transpose(1, 2), mixing.row, mixing.row_offsets).transpose(1, 2)
        for c in range(5):
            x[..., c] = attend(x[..., c].transpose(1, 2), mixing.column, mixing.column_offsets).transpose(1, 2)
    if stride == 2:  # means of 2x2, over what there is at the far edges
        pooled = torch.empty(2, 8, 2, 3, dtype=torch.float64)
        for r in range(2):
            for c in range(3):
                pooled[..., r, c] = x[..., 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].mean(dim=(2, 3))
        x = pooled
    torch.testing.assert_close(got, x, atol=1e-12, rtol=0)


def test_resnet_takes_any_size_but_not_any_channels() -> None:
    model = resnet(RESNET)
    assert model(torch.randn(1, 3, 33, 47, dtype=torch.float64)).shape == (1, 5)
    with pytest.raises(ImageSizeError, match=r"images of \(1, 4, 20, 28\) do not have the 3 channels"):
        model(torch.randn(1, 4, 20, 28, dtype=torch.float64))


def test_axial_resnet_is_tied_to_its_size() -> None:
    model = resnet(replace(RESNET, mixing="axial", axial_heads=2))
    with pytest.raises(ImageSizeError, match=r"images of \(1, 3, 28, 20\) do not fit axial tables for \(20, 28\)"):
        model(torch.randn(1, 3, 28, 20, dtype=torch.float64))
