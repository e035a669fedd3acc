"""One update: micro-batches, their sum, clipping, the optimiser, the average. Nothing here waits for the device.

On a GPU an update can be recorded as one CUDA graph and replayed step after step: a small network's update is some
seven hundred launches, which take the host longer than the work takes the GPU; a recording is one launch. It reads
inputs and learning rates from fixed buffers, so each step first copies its own into them; the next step overwrites the
results.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.data.randomness import hash_keys, hash_word
from vitrail.distributed.parallel import Parallel
from vitrail.distributed.process_group import World
from vitrail.objectives.objective import Objective, ObjectiveOutput
from vitrail.optim.optimiser import Average, Optimiser, clip_factor, total_norm
from vitrail.optim.schedules import Rates
from vitrail.train.config import RECORDED, ResolvedRun
from vitrail.train.step_shape import patch_at, resize_batch


class StepResult(NamedTuple):
    """The result of an update, on the device: global sums by name, the gradient norm, and whether it was applied."""

    names: tuple[str, ...]
    sums: Tensor
    norm: Tensor
    ok: Tensor


WARM = 3  # updates before recording, in which everything that happens once (compiling, choosing, allocating) happens

Update = Callable[[tuple[Tensor, ...], Rates], StepResult]


class RecordedUpdate:
    """Records `update(inputs, rates)`, which must not synchronise with the GPU, and replays it."""

    def __init__(self, update: Update, device: torch.device) -> None:
        self.update, self.device = update, device
        self.rates = Rates(torch.zeros((), device=device), torch.zeros((), device=device))
        self.inputs: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done: StepResult | None = None
        self.warm = 0

    def __call__(self, inputs: tuple[Tensor, ...], rates: Rates) -> StepResult:
        """One update with these inputs, which have the same shapes every time."""
        if not self.inputs:
            self.inputs = tuple(torch.empty_like(tensor) for tensor in inputs)
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        for place, rate in zip(self.rates, rates, strict=True):
            cast(Tensor, place).fill_(rate)
        if self.graph is not None:
            assert self.done is not None
            self.graph.replay()
            return self.done
        if self.warm < WARM:  # on a side stream, as it will be recorded
            current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                done = self.update(self.inputs, self.rates)
            current.wait_stream(side)
            self.warm += 1  # only now: an update that ran out of memory is tried again
            return done
        self.graph = torch.cuda.CUDAGraph()
        # Other threads are not recorded: a loader's thread pins the next batches meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.done = self.update(self.inputs, self.rates)
        self.graph.replay()
        return self.done


class RecordingKey(NamedTuple):
    """What distinguishes updates that are recorded separately."""

    micro: int
    patch: int | None
    shapes: tuple[torch.Size, ...]  # of inputs: the number of segments takes a few different values


@dataclass(slots=True)
class TrainingStep:
    """Adds the gradients of sums over micro-batches and processes, then divides once by the global count. If loss or
    gradient is not finite, the update is skipped: decided on the device, counted when metrics are read. With graphs,
    everything but the inputs is recorded once and replayed; micro-batches then draw their random numbers in turn."""

    objective: Objective
    parallel: Parallel
    optimiser: Optimiser
    average: Average | None
    world: World
    run: ResolvedRun
    recordings: dict[RecordingKey, RecordedUpdate] = field(default_factory=dict[RecordingKey, RecordedUpdate])
    compiled: set[RecordingKey] = field(default_factory=set[RecordingKey])
    building_s: float | None = None  # how long the last update took, if it was compiled or recorded first

    def __call__(self, batch: Batch, *, step: int, rates: Rates, micro: int) -> StepResult:
        inputs = self.prepare_inputs(batch, step)
        patch = self.set_patch(step)
        key = RecordingKey(micro, patch, tuple(tensor.shape for tensor in inputs))
        begun, builds = time.monotonic(), self.must_build(key)
        try:
            if self.run.compile in RECORDED:
                self.world.count_collective()  # a recording does not count its collectives
                seed_generators(self.world.device, self.run.seed, step, self.world.rank, 0)
                done = self.find_recording(key)(inputs, rates)
            else:
                done = self.update(inputs, rates, step, micro)
        finally:
            self.set_patch(None)  # between steps the network is what its config says
        self.compiled.add(key)
        self.building_s = time.monotonic() - begun if builds else None
        self.objective.after_step(step)
        return done

    def must_build(self, key: RecordingKey) -> bool:
        """Whether an update has yet to be compiled or recorded."""
        if self.run.compile in RECORDED:
            return key not in self.recordings or self.recordings[key].graph is None
        return self.run.compile == "on" and key not in self.compiled

    def prepare_inputs(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        """The objective's inputs for this process's whole share of a batch, including sums over all processes."""
        inputs = self.objective.inputs(resize_batch(batch, self.run), seed=self.run.seed, step=step)
        sums = self.objective.normalisers(inputs)
        return inputs if sums is None else (*inputs, self.world.sum_(sums).expand(len(batch), -1))

    def set_patch(self, step: int | None) -> int | None:
        """Sets the network to the patch size of a step, or to its own. Returns the step's size if the run has several
        to draw from."""
        if not self.run.patches:
            return None
        patch = None if step is None else patch_at(self.run, step)
        self.objective.network.set_patch(patch)
        return patch

    def find_recording(self, key: RecordingKey) -> RecordedUpdate:
        """The recording for a patch size and input shapes, made on first use. Micro-batches may shrink in the first
        steps; all recordings are then made again."""
        if key not in self.recordings:
            self.recordings = {known: one for known, one in self.recordings.items() if known.micro == key.micro}
            update = partial(self.update, step=None, micro=key.micro)
            self.recordings[key] = RecordedUpdate(update, self.world.device)
        return self.recordings[key]

    def update(self, inputs: tuple[Tensor, ...], rates: Rates, step: int | None, micro: int) -> StepResult:
        output = self.compute_gradients(inputs, step, micro)
        sums = torch.stack([output.total, output.count, *output.tallies.values()]).float()
        self.world.sum_(sums)
        count = sums[1].clamp(min=1.0) / self.parallel.gradient_factor
        norm = total_norm(self.optimiser.gradients()) / count
        ok = norm.isfinite() & sums[0].isfinite()
        self.optimiser.step(rates, divisor=count / clip_factor(norm, self.run.optim.clip), ok=ok)
        self.optimiser.zero_grad()
        if self.average is not None:
            self.average.update()
        return StepResult(("total", "count", *output.tallies), sums, norm, ok)

    def compute_gradients(self, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> ObjectiveOutput:
        """Forward and backward over the micro-batches; returns this process's sums. Without a `step` the generators are
        not seeded."""
        parts = split_micro_batches(inputs, micro)
        outputs: list[ObjectiveOutput] = []
        for at, part in enumerate(parts):
            if step is not None:
                seed_generators(self.world.device, self.run.seed, step, self.world.rank, at)
            with self.parallel.micro(last=at == len(parts) - 1):
                output: ObjectiveOutput = self.parallel(*part)
                output.total.backward()
            tallies = {name: value.detach() for name, value in output.tallies.items()}
            outputs.append(ObjectiveOutput(output.total.detach(), output.count.detach(), tallies))
        if len(outputs) == 1:
            return outputs[0]
        totals, counts, tallies = zip(*outputs, strict=True)
        sums = {name: torch.stack([one[name] for one in tallies]).sum() for name in tallies[0]}
        return ObjectiveOutput(torch.stack(totals).sum(), torch.stack(counts).sum(), sums)


def split_micro_batches(inputs: tuple[Tensor, ...], micro: int) -> list[tuple[Tensor, ...]]:
    """The inputs in parts of `micro` samples."""
    return list(zip(*(tensor.split(micro) for tensor in inputs), strict=True))


def seed_generators(device: torch.device, seed: int, step: int, rank: int, part: int) -> None:
    """Seeds torch's generators, which dropout and the like draw from, by the position in the run: never saved. Those of
    other devices stay as they are: seeding all, as `torch.manual_seed` does, takes most of a millisecond."""
    key = int(hash_keys(hash_word("step"), seed, step, rank, part)[0] >> 1)
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)
