"""Self-supervision that starts from networks of later families: each objective runs, and reaches every weight that it
can reach."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.lanes import rest_slow
from tests.models.tiny import FAMILIES
from tests.objectives import masked, taught
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.models.vit_config import ViTConfig
from vitrail.models.vit_parts import Rotary
from vitrail.objectives.mae import MAE, MAEObjective
from vitrail.objectives.masked_patches import MaskedPatches, MaskedPatchesObjective
from vitrail.objectives.objective import Objective, ObjectiveContext

HEADLESS: dict[str, dict[str, Any]] = {
    name: {**changes, "head": "none", "classes": 0} for name, changes in FAMILIES.items()
}
FEW = ("dinov3", "rotary, mixed", "siglip", "clip", "two class tokens and the mean")
GRIDS = ("beit", "beit, shared table", "bias table without class token", "sam", "vitdet")  # need all patches
READOUT = ("neck.", "map_pool.", "projection.")


def hiding(name: str, config: MAE | MaskedPatches) -> Objective:
    model = replace(masked.VIT, **{"registers": 0, **HEADLESS[name]})
    context = ObjectiveContext(0, masked.PLAIN, Mix(), 10, masked.WORLD)
    kind = MAEObjective if isinstance(config, MAE) else MaskedPatchesObjective
    objective = kind(masked.network(model), config, context)
    masked.stirred(objective)
    return objective


def trained(objective: Objective, *inputs: torch.Tensor) -> set[str]:
    """The names of the network's parameters that a step changes: all that have a gradient by now."""
    out = objective(*inputs)
    assert out.total.isfinite()
    (out.total / out.count).backward()
    network: nn.Module = objective.network
    for name, parameter in network.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    found = {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    # Nothing that could be trained is left over, for which other processes would wait.
    assert found == {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    return found


@pytest.mark.parametrize("name", rest_slow([name for name in HEADLESS if name not in GRIDS], *FEW))
def test_mae_hides_patches_from_every_kind_of_attention(name: str) -> None:
    objective = hiding(name, MAE(decoder_width=8, decoder_depth=2, decoder_heads=2))
    found = trained(objective, *objective.inputs(masked.batch_of(masked.noise(3)), seed=1, step=2))
    assert found == {name for name, _ in objective.network.named_parameters() if not name.startswith(READOUT)}


@pytest.mark.parametrize("name", GRIDS)
def test_mae_refuses_what_needs_the_whole_grid(name: str) -> None:
    with pytest.raises(ConfigError, match="the whole grid"):
        hiding(name, MAE(decoder_width=8, decoder_depth=2, decoder_heads=2))


@pytest.mark.parametrize("name", rest_slow(HEADLESS, *FEW, "sam"))
def test_masked_patches_are_predicted_by_every_kind(name: str) -> None:
    objective = hiding(name, MaskedPatches())
    found = trained(objective, *objective.inputs(masked.batch_of(masked.noise(3)), seed=1, step=2))
    assert found == {name for name, _ in objective.network.named_parameters() if not name.startswith(READOUT)}


@pytest.mark.parametrize("name", rest_slow(HEADLESS, *FEW, "sam"))
@pytest.mark.parametrize("kind", ["dino", "moco"])
def test_crops_of_several_sizes_reach_every_weight(name: str, kind: str) -> None:
    objective: Any = taught.distil(**HEADLESS[name]) if kind == "dino" else taught.contrast(**HEADLESS[name])
    batch = taught.batch(small=3 if kind == "dino" else 0)
    found = trained(objective, *objective.inputs(batch, seed=1, step=0))
    every = {name for name, _ in objective.network.named_parameters()}
    assert found == (every if kind == "dino" else {name for name in every if not name.startswith("embedding.")})


def test_coordinates_that_vary_are_the_same_for_the_same_seed() -> None:
    rotary = Rotary(coordinates="unit", rescale=2.0)
    losses: list[float] = []
    for seed in (3, 3, 4):
        objective = taught.distil(**{**HEADLESS["dinov3"], "rotary": rotary})
        torch.manual_seed(seed)
        losses.append(float(objective(*objective.inputs(taught.batch(small=3), seed=1, step=0)).total.detach()))
    assert losses[0] == losses[1] != losses[2]


def test_a_network_with_a_readout_of_two_has_a_head_that_wide() -> None:
    objective = taught.distil(pool="token+mean", registers=2)
    model: ViTConfig = objective.model
    assert model.features == 2 * model.width
