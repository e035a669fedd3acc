"""One update: micro-batches, their sum, clipping, the optimiser, the average. Nothing here waits for the device.

What a step leaves.

An update recorded as one CUDA graph, and played again step after step.

A small network's update is some seven hundred launches, which take the host longer than the work takes the GPU; a
recording is one. It reads its inputs and the learning rate where they were when it was made, so each step's are copied
there, and what it leaves is written over by the next.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.data.randomness import hash_keys, hash_word
from vitrail.distributed.parallel import Parallel
from vitrail.distributed.process_group import World
from vitrail.objectives.objective import Objective, ObjectiveOutput
from vitrail.optim.averaging import Average
from vitrail.optim.optimiser import Optimiser, clip_factor, total_norm


class StepResult(NamedTuple):
    """On the device: global sums by name, the gradient's norm, and whether there was an update."""

    names: tuple[str, ...]
    sums: Tensor
    norm: Tensor
    ok: Tensor


WARM = 3  # updates that are done in the ordinary way first: what is compiled, chosen or allocated once is done by then

Update = Callable[[tuple[Tensor, ...], Tensor], StepResult]


class RecordedUpdate:
    """Calls `update(inputs, rate)`, which must neither wait for the GPU nor ask it anything."""

    def __init__(self, update: Update, device: torch.device) -> None:
        self.update, self.device = update, device
        self.rate = torch.zeros((), device=device)
        self.inputs: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done: StepResult | None = None
        self.warm = 0

    def __call__(self, inputs: tuple[Tensor, ...], rate: float) -> StepResult:
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

    def aside(self) -> StepResult:
        """The update itself, next to the default stream, as it will be recorded."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            done = self.update(self.inputs, self.rate)
        current.wait_stream(side)
        return done


class TrainingStep:
    """Gradients of sums are added up over micro-batches and processes, then divided by the global count, once. Where
    loss or gradient is not finite, the update does not happen: decided on the device, counted when metrics are read.
    With `graphs` all of it but the inputs is recorded once and played again; then micro-batches draw their random
    numbers one after another."""

    def __init__(
        self,
        objective: Objective,
        parallel: Parallel,
        optimiser: Optimiser,
        average: Average | None,
        *,
        world: World,
        seed: int,
        clip: float,
        graphs: bool = False,
    ) -> None:
        self.objective, self.parallel, self.optimiser, self.average = objective, parallel, optimiser, average
        self.world, self.seed, self.clip, self.graphs = world, seed, clip, graphs
        self.recordings: dict[int, RecordedUpdate] = {}  # by micro-batch: in the first steps one may prove too large

    def __call__(self, batch: Batch, *, step: int, rate: float, micro: int) -> StepResult:
        inputs = self.objective.inputs(batch, seed=self.seed, step=step)
        if self.graphs:
            self.world.count_collective()  # a recording does not say so
            seed_generators(self.world.device, self.seed, step, self.world.rank, 0)
            done = self.recording(micro)(inputs, rate)
        else:
            done = self.update(inputs, rate, step, micro)
        self.objective.after_step(step)
        return done

    def recording(self, micro: int) -> RecordedUpdate:
        if micro not in self.recordings:
            update = partial(self.update, step=None, micro=micro)
            self.recordings = {micro: RecordedUpdate(update, self.world.device)}
        return self.recordings[micro]

    def update(self, inputs: tuple[Tensor, ...], rate: float | Tensor, step: int | None, micro: int) -> StepResult:
        outcome = self.gradients(inputs, step, micro)
        sums = torch.stack([outcome.total, outcome.count, *outcome.tallies.values()]).float()
        self.world.sum_(sums)
        count = sums[1].clamp(min=1.0) / self.parallel.gradient_factor
        norm = total_norm(self.optimiser.gradients()) / count
        ok = norm.isfinite() & sums[0].isfinite()
        self.optimiser.step(rate, divisor=count / clip_factor(norm, self.clip), ok=ok)
        self.optimiser.zero_grad()
        if self.average is not None:
            self.average.update()
        return StepResult(("total", "count", *outcome.tallies), sums, norm, ok)

    def gradients(self, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> ObjectiveOutput:
        """Forward and backward over the micro-batches; the outcome is this process's sum. Without a `step` random
        numbers are drawn as the generators stand."""
        parts = split_micro_batches(inputs, micro)
        outcomes: list[ObjectiveOutput] = []
        for at, part in enumerate(parts):
            if step is not None:
                seed_generators(self.world.device, self.seed, step, self.world.rank, at)
            with self.parallel.micro(last=at == len(parts) - 1):
                outcome: ObjectiveOutput = self.parallel(*part)
                outcome.total.backward()
            outcomes.append(detach_outcome(outcome))
        return sum_outcomes(outcomes)


def split_micro_batches(inputs: tuple[Tensor, ...], micro: int) -> list[tuple[Tensor, ...]]:
    """The inputs in runs of `micro` samples."""
    return list(zip(*(tensor.split(micro) for tensor in inputs), strict=True))


def seed_generators(device: torch.device, seed: int, step: int, rank: int, part: int) -> None:
    """Dropout and the like draw from torch's generators: set from where we are, never saved. Those of other devices
    stay as they are: to set them, too, as `torch.manual_seed` does, takes most of a millisecond."""
    key = int(hash_keys(hash_word("step"), seed, step, rank, part)[0] >> 1)
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)


def detach_outcome(outcome: ObjectiveOutput) -> ObjectiveOutput:
    """Without what led to it."""
    tallies = {name: value.detach() for name, value in outcome.tallies.items()}
    return ObjectiveOutput(outcome.total.detach(), outcome.count.detach(), tallies)


def sum_outcomes(outcomes: Sequence[ObjectiveOutput]) -> ObjectiveOutput:
    if len(outcomes) == 1:
        return outcomes[0]
    return ObjectiveOutput(
        total=torch.stack([one.total for one in outcomes]).sum(),
        count=torch.stack([one.count for one in outcomes]).sum(),
        tallies={name: torch.stack([one.tallies[name] for one in outcomes]).sum() for name in outcomes[0].tallies},
    )
