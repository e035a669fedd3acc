"""Parameters that are sharded tensors are updated as whole ones are. One process; more are tried where sharding is."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.optim.slow import gradients, grouped, params
from vitrail.optim.config import Optim
from vitrail.optim.optimiser import Average, Optimiser, total_norm


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def sharded(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor, mesh, [Shard(0)])


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("momentum_type", ["float32", "bfloat16"])
def test_shards_are_updated_as_whole_tensors_are(mesh, kind, momentum_type):
    optim = Optim(kind=kind, momentum_type=momentum_type)
    whole = [p for p in params() if p.ndim]
    shards = [nn.Parameter(sharded(p.detach().clone(), mesh)) for p in whole]
    ours, theirs = Optimiser(grouped(shards, 0.1), optim), Optimiser(grouped(whole, 0.1), optim)
    averages = Average(ours.params, 0.9), Average(theirs.params, 0.9)
    for step in range(3):
        drawn = [gradient for gradient in gradients(step) if gradient.ndim]
        for p, q, gradient in zip(shards, whole, drawn, strict=True):
            p.grad, q.grad = sharded(gradient.clone(), mesh), gradient.clone()
        assert torch.equal(total_norm(ours.gradients()), total_norm(theirs.gradients()))
        assert not isinstance(total_norm(ours.gradients()), DTensor)
        for optimiser, average in zip((ours, theirs), averages, strict=True):
            optimiser.step(1e-2, divisor=torch.tensor(2.0), ok=torch.tensor(step != 1))
            average.update()
    for state, reference in ((ours.state(), theirs.state()), (averages[0].state(), averages[1].state())):
        for name, tensor in state.items():
            if name != "count":
                assert isinstance(tensor, DTensor)
                assert tensor.placements == (Shard(0),)
                assert torch.equal(tensor.full_tensor(), reference[name])
    for p, q in zip(shards, whole, strict=True):
        assert torch.equal(p.full_tensor(), q)
    with averages[0].swap_in(), averages[1].swap_in():
        for p, q in zip(shards, whole, strict=True):
            assert torch.equal(p.full_tensor(), q)
