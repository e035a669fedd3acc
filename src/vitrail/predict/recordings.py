"""Calls of a network on small batches, recorded as CUDA graphs: on so few images the GPU finishes a kernel before the
host can launch the next."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from vitrail.models.query_output import Output, map_output

FEW: Final = 8  # images per recorded batch, at most
WARM: Final = 2  # calls of a kind before one is recorded, so that one-time initialisation is not part of the graph
SETTINGS: Final = (bool, int, float, str, tuple, type(None))  # types of attributes that are settings
RECORDING: Final = threading.Lock()  # a process records one call at a time
Compute: TypeAlias = Callable[[Tensor], Output]
Key: TypeAlias = tuple[str, torch.Size]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded call, with its input and output buffers."""

    graph: torch.cuda.CUDAGraph
    batch: Tensor
    found: Output

    @torch.inference_mode()
    def replay(self, batch: Tensor) -> Output:
        self.batch.copy_(batch)
        self.graph.replay()
        return self.found


class RecordedCalls:
    """Recorded computations on small batches, by name and shape. One thread runs at a time.

    A replay reads parameters and buffers at the addresses they had when it was recorded, takes the path that the
    network's settings chose then (training mode, patch size, fp8), and runs no hooks. If any of these has changed, its
    result is discarded; this is checked while the GPU is busy with the replay."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network, self.device = network, device
        self.lock = threading.Lock()
        self.calls: dict[Key, int] = {}
        self.recordings: dict[Key, Recording] = {}
        self.failed: set[Key] = set()  # calls that cannot be recorded, such as those that synchronise
        self.state: tuple[Any, ...] | None = None
        self.held: list[Tensor] = []  # keeps the tensors that recordings read from being freed before them
        self.pool: Any = None  # memory pool shared by all recordings, of which one runs at a time

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or a pickle, starts without recordings."""
        return type(self), (self.network, self.device)

    def run(self, name: str, compute: Compute, batch: Tensor, copy: Callable[[Tensor], Tensor]) -> Output:
        """Runs or replays `compute` on a batch and returns a copy of its result, made by `copy`. A `name` always stands
        for the same function, which must not synchronise with the GPU."""
        key = (name, batch.shape)
        with self.lock, torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if (recording := self.recordings.get(key)) is not None:
                found = recording.replay(batch)
                if self._describe_network() == self.state:
                    return map_output(found, copy)
            return map_output(self._run_first(key, compute, batch.to(self.device)), copy)

    def _run_first(self, key: Key, compute: Compute, batch: Tensor) -> Output:
        state = self._describe_network()
        if state is None:
            return compute(batch)
        if state != self.state:
            self.recordings.clear()
            self.calls.clear()
            self.failed.clear()
            self.pool = None
            tensors = (*self.network.parameters(), *self.network.buffers())
            self.state, self.held = state, [tensor.detach() for tensor in tensors]
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= WARM:
            return self._warm_up(compute, batch)
        if key not in self.failed:
            try:
                with RECORDING:
                    self.recordings[key] = self._record(compute, batch)
                return self.recordings[key].replay(batch)
            except RuntimeError:  # a network of the user's may synchronise, or memory may run out
                self.recordings.pop(key, None)
                self.failed.add(key)
        return compute(batch)

    def _warm_up(self, compute: Compute, batch: Tensor) -> Output:
        """Runs on a side stream, as the recording will."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            found = compute(batch)
        current.wait_stream(side)
        return found

    def _record(self, compute: Compute, batch: Tensor) -> Recording:
        place, graph, stream = batch.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            found = compute(place)
        self.pool = graph.pool()
        return Recording(graph, place, found)

    def _describe_network(self) -> tuple[Any, ...] | None:
        """The addresses of the network's parameters and buffers, and its settings; None if any module has a hook."""
        if nn.modules.module._has_any_global_hook():  # pyright: ignore[reportPrivateUsage]
            return None
        near = (self.network, *self.network.children())
        state: list[Any] = [value for part in near for value in vars(part).values() if type(value) in SETTINGS]
        waiting: list[nn.Module] = [self.network]
        while waiting:
            part = waiting.pop()
            if part._forward_hooks or part._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
                return None
            tensors = (*part._parameters.values(), *part._buffers.values())  # pyright: ignore[reportPrivateUsage]
            state += [tensor.data_ptr() for tensor in tensors if tensor is not None]
            state.append(part.training)
            waiting += [child for child in part._modules.values() if child is not None]  # pyright: ignore[reportPrivateUsage]
        return tuple(state)
