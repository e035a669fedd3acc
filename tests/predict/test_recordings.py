"""Calls recorded as CUDA graphs: the same numbers, and never those of a network that has changed."""

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import vitrail
from vitrail.checkpoint.weights import build_network, replace_head_and_resize, to_bundle
from vitrail.core.precision import PrecisionChoice
from vitrail.models.query_output import Output
from vitrail.predict.recordings import FEW, WARM, Compute, RecordedCalls, Recording


class Replay:
    """In the place of a graph: it computes again with the parameters that lay there when it was made."""

    def __init__(self, network: nn.Linear, place: Tensor, found: Tensor) -> None:
        self.weight, self.place, self.found, self.count = network.weight.detach(), place, found, 0

    def replay(self) -> None:
        self.count += 1
        self.found.copy_(self.place @ self.weight.t())


class PretendedCalls(RecordedCalls):
    """Without a GPU."""

    def _warm_up(self, compute: Compute, batch: Tensor) -> Output:
        return compute(batch)

    def _record(self, compute: Compute, batch: Tensor) -> Recording:
        place, found = batch.clone(), cast(Tensor, compute(batch)).detach().clone()
        graph: Any = Replay(cast(nn.Linear, self.network), place, found)
        return Recording(graph, place, found)


def make_calls() -> tuple[nn.Linear, PretendedCalls]:
    network = nn.Linear(4, 3, bias=False)
    return network, PretendedCalls(network, torch.device("cpu"))


def ask(calls: PretendedCalls, batch: Tensor) -> Tensor:
    return cast(Tensor, calls.run("outputs", calls.network, batch, torch.clone)).detach()


def test_the_third_call_of_a_shape_is_recorded_and_the_next_are_replayed() -> None:
    network, calls = make_calls()
    for count in (2, 5):
        for turn in range(WARM + 3):
            batch = torch.randn(count, 4)
            torch.testing.assert_close(ask(calls, batch), network(batch).detach())
            assert (("outputs", torch.Size([count, 4])) in calls.recordings) == (turn >= WARM)
    counts = [cast(Any, one.graph).count for one in calls.recordings.values()]
    assert counts == [3, 3]


def test_values_may_change_where_they_lie() -> None:
    network, calls = make_calls()
    batch = torch.randn(1, 4)
    for _ in range(WARM + 2):
        ask(calls, batch)
    with torch.no_grad():
        network.weight.mul_(2)
    torch.testing.assert_close(ask(calls, batch), network(batch).detach())
    assert len(calls.recordings) == 1


def test_new_parameters_are_recorded_anew() -> None:
    network, calls = make_calls()
    batch = torch.randn(1, 4)
    for _ in range(WARM + 2):
        ask(calls, batch)
    for _ in range(WARM + 2):
        network.weight = nn.Parameter(torch.randn(3, 4))
        torch.testing.assert_close(ask(calls, batch), network(batch).detach())
        assert not calls.recordings
    for turn in range(WARM + 2):
        torch.testing.assert_close(ask(calls, batch), network(batch).detach())
        assert bool(calls.recordings) == (turn >= WARM - 1)


@pytest.mark.parametrize("change", ["buffer", "training", "setting"])
def test_a_network_in_another_state_is_recorded_anew(change: str) -> None:
    network, calls = make_calls()
    network.register_buffer("table", torch.zeros(2))
    network.setting = 1
    batch = torch.randn(1, 4)
    for _ in range(WARM + 2):
        ask(calls, batch)
    assert calls.recordings
    if change == "buffer":
        network.table = torch.ones(2)
    elif change == "training":
        network.eval()
    else:
        network.setting = 2
    torch.testing.assert_close(ask(calls, batch), network(batch).detach())
    assert not calls.recordings


def test_a_recording_may_be_made_in_inference_mode() -> None:
    network, calls = make_calls()
    batch = torch.randn(1, 4)
    with torch.inference_mode():
        for _ in range(WARM + 2):
            ask(calls, batch)
    torch.testing.assert_close(ask(calls, batch), network(batch).detach())


def test_what_cannot_be_recorded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    network, calls = make_calls()
    tries, batch = list[Compute](), torch.randn(1, 4)

    def refuse(compute: Compute, batch: Tensor) -> Recording:
        tries.append(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(calls, "_record", refuse)
    for _ in range(WARM + 3):
        torch.testing.assert_close(ask(calls, batch), network(batch).detach())
    assert len(tries) == 1


def test_a_recording_that_cannot_be_replayed_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    network, calls = make_calls()
    batch = torch.randn(1, 4)

    def refuse(_: Replay) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Replay, "replay", refuse)
    for _ in range(WARM + 3):
        torch.testing.assert_close(ask(calls, batch), network(batch).detach())
    assert not calls.recordings


def test_copies_start_without_recordings() -> None:
    _, calls = make_calls()
    for _ in range(WARM + 2):
        ask(calls, torch.randn(1, 4))
    for other in (copy.deepcopy(calls), pickle.loads(pickle.dumps(calls))):
        assert not other.recordings
        torch.testing.assert_close(other.network.weight, calls.network.weight)


def test_global_hooks_run() -> None:
    network, calls = make_calls()
    batch, seen = torch.randn(1, 4), list[Tensor]()
    for _ in range(WARM + 2):
        ask(calls, batch)
    with nn.modules.module.register_module_forward_hook(lambda _, args, out: seen.append(out)):
        ask(calls, batch)
    assert len(seen) == 1
    torch.testing.assert_close(ask(calls, batch), network(batch).detach())


def test_hooks_run() -> None:
    network, calls = make_calls()
    batch, seen = torch.randn(1, 4), list[Tensor]()
    for _ in range(WARM + 2):
        ask(calls, batch)
    hook = network.register_forward_hook(lambda _, args, out: seen.append(out))
    for count in range(1, 5):
        torch.testing.assert_close(ask(calls, batch), network(batch).detach())
        assert len(seen) == 2 * count
    hook.remove()
    torch.testing.assert_close(ask(calls, batch), network(batch).detach())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["vit_ti_16", "r50_vit_b_16", "bit_r50x1", "eomt"])
def test_predictors_record_on_a_gpu(name: str, precision: PrecisionChoice) -> None:
    if name == "eomt":
        fresh = to_bundle(vitrail.create_model("vit_ti_16", image_size=64))
        network = build_network(replace_head_and_resize(fresh, 5, kind="eomt"))
    else:
        network = vitrail.create_model(name, num_classes=10)
        with torch.no_grad():
            network.get_classifier().weight.normal_(std=0.1)
    names = map(str, range(network.num_classes))
    asker: Any = vitrail.Predictor(network, device="cuda", precision=precision, labels=names)
    images = torch.randint(256, (FEW + 4, 3, *asker.preprocessing.image), dtype=torch.uint8)

    def read() -> list[Tensor]:
        found = [asker.outputs(images[count:]) for count in range(4, 12)]
        parts = [part for one in found for part in ([one] if isinstance(one, Tensor) else one)]
        return [*parts, *([] if name == "eomt" else [asker.embed_batch(images[4:])])]

    exact = [read() for _ in range(WARM + 3)]
    assert asker._recorded is not None
    assert len(asker._recorded.recordings) == FEW + (name != "eomt")
    for later in exact[1:]:
        for first, again in zip(exact[0], later, strict=True):
            torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-4 * float(first.abs().max()))
    whole = asker.outputs(images[:9]), asker.outputs(images[1:9])
    for many, few in zip(*([one] if isinstance(one, Tensor) else one for one in whole), strict=True):
        torch.testing.assert_close(many[1:], few, rtol=0.05, atol=0.05 * float(few.abs().max()))
