"""Devices are chosen in one order everywhere, and what Apple's GPUs lack is kept from them. None of this needs one."""

import pytest
import torch
from torch import nn

from vitrail.core.errors import ConfigError
from vitrail.distributed.meta_init import give_storage
from vitrail.distributed.process_group import find_device, name_device, synchronise, widest_float
from vitrail.train import step
from vitrail.train.grid.engine import device_slots
from vitrail.train.metrics import Meter

MPS = torch.device("mps")


def has(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, mps: bool = False) -> None:
    """As if this machine had so many CUDA GPUs, or Apple's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(2, True, "cuda:0"), (1, False, "cuda:0"), (0, True, "mps"), (0, False, "cpu")]
)
def test_auto_takes_cuda_then_mps_then_the_cpu(monkeypatch, cuda: int, mps: bool, expected: str) -> None:
    has(monkeypatch, cuda=cuda, mps=mps)
    assert str(find_device("auto")) == expected
    assert str(find_device("cpu")) == "cpu"


def test_mps_is_for_one_process_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, mps=True)
    assert find_device("mps") == MPS
    assert str(find_device("auto", world_size=2)) == "cpu"
    with pytest.raises(ConfigError, match="one process"):
        find_device("mps", world_size=2)
    assert [place.device for place in device_slots("auto")] == ["mps"]
    has(monkeypatch)
    with pytest.raises(ConfigError, match="use device cpu"):
        find_device("mps")
    with pytest.raises(ConfigError, match="auto, cpu, cuda or mps"):
        find_device("warp")


def test_what_differs_between_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    for device in (MPS, torch.device("cuda", 1), torch.device("cpu")):
        synchronise(device)
    assert waited == ["mps", "cuda:1"]
    assert (widest_float(MPS), widest_float(torch.device("cpu"))) == (torch.float32, torch.float64)
    assert (name_device(MPS), name_device(torch.device("cpu"))) == ("Apple GPU (mps)", "CPU")


def test_training_makes_no_float64_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    with torch.random.fork_rng(devices=[]):
        step.seed_generators(MPS, 0, 1, 0, 0)
    assert len(seeds) == 1

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rule", torch.eye(3, dtype=torch.float64))

    moved: list[torch.dtype] = []
    module = Fixed()
    monkeypatch.setattr(module, "to", lambda device: moved.append(module.get_buffer("rule").dtype))
    give_storage(module, MPS)
    assert moved == [torch.float32]

    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, dtype: real(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "full", lambda shape, value, *, device, dtype: real(shape, dtype=dtype) + value)
    meter = Meter(MPS)
    meter.add(0, ("total",), torch.ones(1), torch.ones(()), torch.tensor(True))
    meter.send(0)
    assert meter.sent is not None
    assert meter.sent[2].dtype == torch.float32
