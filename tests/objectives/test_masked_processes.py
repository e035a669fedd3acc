"""Objectives that hide patches, on two processes: the draws, the loss and the gradients of one."""

import pytest
import torch
from torch import Tensor

from tests.distributed.pair import together
from tests.objectives.masked import PLAIN, SEED, STEP, WORLD, batch_of, model, network, noise, seeded, stirred
from vitrail.core.precision import Precision
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.meta_init import gather_tensor
from vitrail.distributed.parallel import Sharding, parallelise
from vitrail.distributed.process_group import World
from vitrail.objectives.mae import MAE, MAEObjective
from vitrail.objectives.masked_patches import MaskedPatches, MaskedPatchesObjective
from vitrail.objectives.objective import ObjectiveContext

WAYS: list[tuple[Sharding, Precision]] = [("ddp", "float32"), ("fsdp", "float32"), ("fsdp", "bfloat16")]


def objective_of(kind: str, world: World) -> MaskedPatchesObjective | MAEObjective:
    vit = network(model(position="sincos2d"))
    made: MaskedPatchesObjective | MAEObjective
    with seeded(1):
        if kind == "masked patches":
            made = MaskedPatchesObjective(
                vit, MaskedPatches(target="small-patch"), ObjectiveContext(0, PLAIN, Mix(), 1, world)
            )
        else:
            small = MAE(decoder_width=8, decoder_depth=1, decoder_heads=2)
            made = MAEObjective(vit, small, ObjectiveContext(0, PLAIN, Mix(), 1, world))
    stirred(made)
    return made


def gradients(
    world: World, kind: str, sharding: Sharding = "none", precision: Precision = "float32"
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradients, summed over processes, by this process's part of one batch."""
    objective = objective_of(kind, world)
    parallel = parallelise(objective, world=world, sharding=sharding, precision=precision)
    each = 4 // world.size
    mine = slice(world.rank * each, (world.rank + 1) * each)
    batch = batch_of(noise(4)[mine], first=world.rank * each)
    outcome = parallel(*objective.inputs(batch, seed=SEED, step=STEP))
    outcome.total.backward()
    found = dict[str, Tensor]()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None
        found[name] = gather_tensor(parameter.grad, world) * parallel.gradient_factor
    return float(world.sum_(outcome.total.detach().clone())), found


def several(world: World, kind: str) -> list[tuple[float, dict[str, Tensor]]]:
    return [gradients(world, kind, *way) for way in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked patches", pytest.param("mae", marks=pytest.mark.slow)])
def test_two_processes_find_the_gradients_of_one(kind: str) -> None:
    loss, alone = gradients(WORLD, kind)
    largest = max(float(tensor.abs().max()) for tensor in alone.values())
    for (found_loss, found), (_, precision) in zip(together(several, kind)[0], WAYS, strict=True):
        near = 1e-5 if precision == "float32" else 0.05
        assert found_loss == pytest.approx(loss, rel=near)
        assert list(found) == list(alone)
        assert max(float((found[name] - alone[name]).abs().max()) for name in alone) < near * largest
        assert torch.tensor([bool(tensor.isfinite().all()) for tensor in found.values()]).all()
