"""Calls of a network on few images, recorded as CUDA graphs: a GPU is through with so few before their kernels are
launched one by one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from vitrail.models.query_output import Output, map_output

FEW: Final = 8  # images, at most
WARM: Final = 2  # calls of a kind before the one that is recorded: what only the first one does is not for a recording
Compute: TypeAlias = Callable[[Tensor], Output]
Key: TypeAlias = tuple[str, torch.Size]


@dataclass(frozen=True, slots=True)
class Recording:
    """One call, with the places of what it reads and gives."""

    graph: torch.cuda.CUDAGraph
    batch: Tensor
    found: Output

    def replay(self, batch: Tensor) -> Output:
        self.batch.copy_(batch)
        self.graph.replay()
        return self.found


class RecordedCalls:
    """What is computed from batches of few images, by name and shape. Threads wait for each other.

    A recording reads parameters where they lay when it was made, and runs no hook. So it does not count where they have
    moved or somebody looks into the network, which is found out while the GPU is busy with it."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network, self.device = network, device
        self.lock = threading.Lock()
        self.calls: dict[Key, int] = {}
        self.recordings: dict[Key, Recording] = {}
        self.state: tuple[int, ...] | None = None
        self.held: list[Tensor] = []  # parameters that recordings read, which are not freed before those
        self.pool: Any = None  # of memory that all recordings share: one runs at a time

    def run(self, name: str, compute: Compute, batch: Tensor, copy: Callable[[Tensor], Tensor]) -> Output:
        """What `compute` makes of a batch, copied to where it may stay. Under one `name` it is always the same
        function, which must not wait for the GPU."""
        key = (name, batch.shape)
        with self.lock:
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
            self.state, self.held = state, [parameter.detach() for parameter in self.network.parameters()]
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= WARM:
            return self._warm_up(compute, batch)
        self.recordings[key] = self._record(compute, batch)
        return self.recordings[key].replay(batch)

    def _warm_up(self, compute: Compute, batch: Tensor) -> Output:
        """On a stream of its own, as it will be recorded."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            found = compute(batch)
        current.wait_stream(side)
        return found

    def _record(self, compute: Compute, batch: Tensor) -> Recording:
        place, graph = batch.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            found = compute(place)
        self.pool = graph.pool()
        return Recording(graph, place, found)

    def _describe_network(self) -> tuple[int, ...] | None:
        """Where its parameters lie; None where a hook is to run."""
        places: list[int] = []
        waiting: list[nn.Module] = [self.network]
        while waiting:
            part = waiting.pop()
            if part._forward_hooks or part._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
                return None
            places += [tensor.data_ptr() for tensor in part._parameters.values() if tensor is not None]  # pyright: ignore[reportPrivateUsage]
            waiting += [child for child in part._modules.values() if child is not None]  # pyright: ignore[reportPrivateUsage]
        return tuple(places)
