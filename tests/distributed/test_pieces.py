"""Rows go to a checkpoint and come back: each is written once, whoever holds it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.pair import together
from tests.distributed.small import objective
from vitrail.distributed.meta_init import copy_rows, gather_tensor, is_writer, local_rows
from vitrail.distributed.parallel import Sharding, parallelise
from vitrail.distributed.process_group import World

ALONE = World(device=torch.device("cpu"))
EXPECTED = {name: tensor.detach().clone() for name, tensor in objective("vit").named_parameters()}


def written(world: World, sharding: Sharding) -> list[tuple[str, Tensor, tuple[int, ...], int]]:
    """The pieces that this process would write, of the parameters and of a moment that is sharded alike."""
    learner = objective("vit")
    parallelise(learner, world=world, sharding=sharding)
    state = dict(learner.named_parameters())
    state |= {f"moment {name}": torch.zeros_like(tensor) + 2 for name, tensor in learner.named_parameters()}
    return [(name, *local_rows(tensor)) for name, tensor in state.items() if is_writer(tensor, world)]


@pytest.mark.parametrize(
    ("sharding", "size", "nodes"),
    [
        ("ddp", 2, 1),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in (("fsdp", 3, 1), ("hsdp", 4, 2), ("fsdp", 2, 1), ("hsdp", 2, 1), ("hsdp", 2, 2))
        ),
    ],
)
def test_every_row_is_written_once(sharding: Sharding, size: int, nodes: int) -> None:
    pieces = together(written, sharding, size=size, nodes=nodes)
    assert any(len(part) < 2 * len(EXPECTED) for part in pieces)  # some hold no row of some tensor, and write none
    for name, expected in EXPECTED.items():
        found = sorted((one for part in pieces for one in part if one[0] == name), key=lambda one: one[3])
        assert {one[2] for one in found} == {tuple(expected.shape)}
        ends = [one[3] + one[1].shape[0] for one in found]
        assert [one[3] for one in found] == [0, *ends[:-1]]
        assert torch.equal(torch.cat([one[1] for one in found]), expected), name
        moments = sorted((one for part in pieces for one in part if one[0] == f"moment {name}"), key=lambda one: one[3])
        assert [one[3] for one in moments] == [one[3] for one in found]


def read(world: World, sharding: Sharding, state: dict[str, Tensor]) -> dict[str, Any]:
    """Fills a fresh objective with rows of whole tensors, and gives them back whole."""
    learner = objective("vit")
    parallelise(learner, world=world, sharding=sharding)
    for name, parameter in learner.named_parameters():
        rows, shape, start = local_rows(parameter)
        assert shape == tuple(state[name].shape)
        copy_rows(parameter, state[name][start : start + rows.shape[0]])
    return {name: gather_tensor(parameter, world) for name, parameter in learner.named_parameters()}


@pytest.mark.parametrize(("sharding", "size"), [("ddp", 2), pytest.param("fsdp", 3, marks=pytest.mark.slow)])
def test_rows_come_back(sharding: Sharding, size: int) -> None:
    torch.manual_seed(3)
    state = {name: torch.randn_like(tensor) for name, tensor in EXPECTED.items()}
    first, *others = together(read, sharding, state, size=size)
    for name, tensor in state.items():
        assert torch.equal(first[name], tensor), name
        assert all(other[name].is_meta and other[name].shape == tensor.shape for other in others)


def test_one_process_holds_everything() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    rows, shape, start = local_rows(tensor)
    assert (shape, start) == ((3, 2), 0)
    copy_rows(tensor, torch.ones(3, 2))
    assert torch.equal(rows, torch.ones(3, 2))  # it shares storage
    assert is_writer(tensor, ALONE)
    assert not is_writer(tensor, World(device=torch.device("cpu"), rank=1, size=2))
    assert torch.equal(gather_tensor(tensor, ALONE), tensor)
    assert local_rows(torch.tensor(1.0))[1:] == ((), 0)
    with pytest.raises(ValueError, match=r"rows of \(2, 2\) do not fit the \(3, 2\)"):
        copy_rows(tensor, torch.ones(2, 2))
