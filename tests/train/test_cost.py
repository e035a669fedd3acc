"""The ledger of a run, and the rate that utilisation is measured against."""

from types import SimpleNamespace

import pytest
import torch

from vitrail.train import metrics as cost
from vitrail.train.metrics import RunCost, Throughput


def test_the_slow_start_of_a_library_does_not_set_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[float] = []

    def slow_at_first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        took.append(0.001 if took else 0.2)
        return a

    monkeypatch.setattr(torch, "mm", slow_at_first)
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: sum(took)))
    assert cost.measure_flops(torch.device("cpu")) == pytest.approx(2 * 512**3 / 0.001)
    assert len(took) > cost.PRODUCTS


def test_table_6s_compute_comes_out() -> None:
    """ViT-B/16 on JFT for 7 epochs: 17.56 GMAC with its head, 303 million images, 224 exaFLOPs."""
    ledger = RunCost(macs=17_580_000_000, samples=303_000_000, devices=1, peak=1e15)
    ledger.add(7 * 303_000_000, 86400.0)
    row = ledger.row()
    assert row["exaflops"] == pytest.approx(224, rel=0.005)
    assert row["epochs"] == 7
    assert row["core_days"] == 1
    again = RunCost(macs=1, samples=1, devices=1, peak=1.0)
    again.restore(ledger.state())
    assert again.images == ledger.images


def test_a_peak_that_was_measured_too_low_is_raised_by_what_the_run_reaches() -> None:
    """Six FLOPs a MAC and image."""
    ledger = RunCost(macs=10, samples=1, devices=2, peak=75.0)
    assert ledger.utilisation(5.0) == pytest.approx(1.0)  # 300 FLOP/s, on two devices
    assert ledger.utilisation(10.0) == 1.0
    assert ledger.utilisation(5.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("built", "speed"),
    [
        ((None, None), 2 * 8 / 104),
        ((100.0, None), 2 * 8 / 4),  # the first step was compiled
        ((52.0, 52.0), 2 * 8 / 104),  # every step was
    ],
)
def test_compiling_costs_time_but_does_not_count_for_the_speed(
    built: tuple[float | None, ...], speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(cost, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ledger = RunCost(macs=10, samples=1, devices=1, peak=75.0)
    throughput = Throughput(ledger, batch=8)
    for building in built:
        throughput.count_step(building)
    clock[0] = 104.0
    assert throughput.update(2)["images_per_s"] == pytest.approx(speed)
    assert ledger.row()["device_hours"] == pytest.approx(104 / 3600)
    throughput.count_step()
    clock[0] += 2.0
    assert throughput.update(1)["images_per_s"] == pytest.approx(8 / 2)
