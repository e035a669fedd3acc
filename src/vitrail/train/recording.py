"""An update recorded as one CUDA graph, and played again step after step.

A small network's update is some seven hundred launches, which take the host longer than the work takes the GPU; a
recording is one. It reads its inputs and the learning rate where they were when it was made, so each step's are copied
there, and what it leaves is written over by the next.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitrail.train.done import Done

WARM = 3  # updates that are done in the ordinary way first: what is compiled, chosen or allocated once is done by then

Update = Callable[[tuple[Tensor, ...], Tensor], Done]


class Recording:
    """Calls `update(inputs, rate)`, which must neither wait for the GPU nor ask it anything."""

    def __init__(self, update: Update, device: torch.device) -> None:
        self.update, self.device = update, device
        self.rate = torch.zeros((), device=device)
        self.inputs: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done: Done | None = None
        self.warm = 0

    def __call__(self, inputs: tuple[Tensor, ...], rate: float) -> Done:
        """One update by these inputs, which have the same shapes every time."""
        if not self.inputs:
            self.inputs = tuple(torch.empty_like(tensor) for tensor in inputs)
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        self.rate.fill_(rate)
        if self.graph is not None:
            assert self.done is not None
            self.graph.replay()
            return self.done
        if self.warm < WARM:
            done = self.aside()
            self.warm += 1  # one that fails, for want of memory, is tried again
            return done
        self.graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile is not part of it: one of a loader pins the batches to come.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.done = self.update(self.inputs, self.rate)
        self.graph.replay()
        return self.done

    def aside(self) -> Done:
        """The update itself, beside the default stream, as it will be recorded."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            done = self.update(self.inputs, self.rate)
        current.wait_stream(side)
        return done
