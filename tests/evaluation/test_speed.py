"""Timing over batch sizes, on a bench of known speed and memory; and a small network for real."""

from dataclasses import dataclass, field

import pytest
import torch

from vitrail.checkpoint.weights import build_fresh
from vitrail.core.errors import ConfigError
from vitrail.distributed.process_group import synchronise
from vitrail.evaluation.speed import LEAST, PATIENCE, SpeedLimits, TimedNetwork, count_allocated, measure_speed
from vitrail.models.vit_config import ViTConfig

TINY = ViTConfig(width=16, depth=2, mlp_width=32, heads=2, patch=(4, 4), image=(16, 16), classes=10)


@dataclass
class Machine:
    """A pass takes `start` and `each` seconds an image, 100 bytes and 10 an image, and no more than `holds` bytes."""

    start: float = 1.0
    each: float = 0.1
    holds: int = 10**9
    tries: bool = False
    now: float = 0.0
    ran: list[int] = field(default_factory=list)

    def seconds(self, batch: int) -> float:
        if self.memory(batch) > self.holds:
            raise torch.OutOfMemoryError
        self.ran.append(batch)
        took = self.start + self.each * batch + (50.0 if len(self.ran) == 1 else 0.0)  # the first is slow
        self.now += took
        return took

    def memory(self, batch: int) -> int:
        return 100 + 10 * batch

    def clock(self) -> float:
        return self.now


def test_batches_double_until_nothing_is_gained() -> None:
    machine = Machine()
    found = measure_speed(machine, SpeedLimits(seconds=1e9), clock=machine.clock)
    assert [point.batch for point in found.points] == [1 << at for at in range(len(found.points))]
    assert found.stopped == "no faster"
    assert 9.5 < found.best.images_per_s < 10  # 1 / each
    gains = [point.images_per_s for point in found.points]
    assert gains[-PATIENCE] < 1.02 * gains[-PATIENCE - 1]
    assert gains[-PATIENCE - 2] * 1.02 < gains[-PATIENCE - 1]
    assert found.largest is None  # nobody said how much room there is


def test_the_first_pass_does_not_count() -> None:
    machine = Machine()
    found = measure_speed(machine, SpeedLimits(batches=(4,), seconds=1000), clock=machine.clock)
    assert found.points[0].seconds == pytest.approx(1.4)
    assert found.points[0].passes == LEAST
    assert found.stopped == "all requested"


def test_time_ends_it_before_the_batch_that_would_take_too_long() -> None:
    machine = Machine(start=10.0)
    found = measure_speed(machine, SpeedLimits(seconds=300), clock=machine.clock)
    assert found.stopped == "time"
    assert len(found.points) > 1
    assert machine.now <= 300


def test_one_point_there_always_is() -> None:
    machine = Machine(start=100.0)
    found = measure_speed(machine, SpeedLimits(seconds=1, room=100 + 10 * 100), clock=machine.clock)
    assert [(point.batch, point.passes) for point in found.points] == [(1, 1)]
    assert found.largest == 100


def test_memory_ends_it_and_tells_the_largest_batch() -> None:
    machine = Machine(holds=100 + 10 * 100)
    found = measure_speed(machine, SpeedLimits(seconds=1e9, room=100 + 10 * 100), clock=machine.clock)
    assert found.stopped == "memory"
    assert max(machine.ran) == 64  # 128 is known not to fit before it is tried
    assert (found.largest, found.tried) == (100, False)


def test_a_gpu_tries_the_largest_batch_and_steps_back() -> None:
    machine = Machine(holds=100 + 10 * 93, tries=True)
    found = measure_speed(machine, SpeedLimits(seconds=1e9, room=100 + 10 * 100), clock=machine.clock)
    assert found.tried
    assert machine.ran[-1] == found.largest == 90  # 100, 95, 90


def test_a_batch_beyond_what_kernels_take_is_reckoned_only() -> None:
    machine = Machine(tries=True)
    found = measure_speed(machine, SpeedLimits(seconds=1e9, room=100 + 10 * 100_000), clock=machine.clock)
    assert (found.largest, found.tried) == (100_000, False)
    assert max(machine.ran) < 100_000


def test_what_does_not_fit_at_all_is_said() -> None:
    with pytest.raises(ConfigError):
        measure_speed(Machine(holds=10), SpeedLimits())


@pytest.mark.parametrize("wrong", [{"batches": (0,)}, {"seconds": 0.0}, {"room": -1}])
def test_limits_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SpeedLimits(**wrong)  # type: ignore[arg-type]


def test_allocations_are_counted_at_their_peak() -> None:
    def work() -> None:
        one = torch.zeros(1000)
        two = torch.zeros(500)
        del one
        three = torch.zeros(100)
        del two, three

    assert count_allocated(work) == pytest.approx(6000, abs=200)  # blocks are rounded up


@pytest.mark.slow
def test_a_network_for_real(capfd: pytest.CaptureFixture[str]) -> None:
    passes = TimedNetwork(network=build_fresh(TINY), device=torch.device("cpu"))
    found = measure_speed(passes, SpeedLimits(batches=(1, 2, 4), seconds=20, room=1 << 30))
    assert [point.batch for point in found.points] == [1, 2, 4]
    assert all(point.images_per_s > 0 for point in found.points)
    one, two, four = (point.memory or 0 for point in found.points)
    held = sum(tensor.numel() for tensor in build_fresh(TINY).parameters()) * 4
    assert held < one < two < four
    assert found.largest is not None
    assert found.largest > 1000
    assert not passes.network.training
    assert "gpuGetDeviceCount" not in capfd.readouterr().err


def test_bfloat16_takes_less() -> None:
    low = TimedNetwork(network=build_fresh(TINY), device=torch.device("cpu"), precision="bfloat16")
    high = TimedNetwork(network=build_fresh(TINY), device=torch.device("cpu"))
    assert (low.memory(2) or 0) < 0.75 * (high.memory(2) or 0)


def test_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[str]()
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    synchronise(torch.device("cpu"))
    assert waited == []
    synchronise(torch.device("mps"))
    assert waited == ["mps"]
