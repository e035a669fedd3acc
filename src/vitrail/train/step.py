"""One update: micro-batches, their sum, clipping, the optimiser, the average. Nothing here waits for the device.

On a GPU an update can be recorded as one CUDA graph and replayed step after step: a small network's update is some
seven hundred launches, which take the host longer than the GPU needs for the work; a recording is one launch. It reads
its inputs and the learning rate from fixed buffers, so each step copies its own there, and the next step overwrites the
results.
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
from vitrail.optim.optimiser import Average, Optimiser, clip_factor, total_norm


class StepResult(NamedTuple):
    """The result of an update, on the device: global sums by name, the gradient's norm, and whether it took place."""

    names: tuple[str, ...]
    sums: Tensor
    norm: Tensor
    ok: Tensor


WARM = 3  # updates before recording, in which everything that happens once (compiling, choosing, allocating) happens

Update = Callable[[tuple[Tensor, ...], Tensor], StepResult]


class RecordedUpdate:
    """Records `update(inputs, rate)`, which must not synchronise with the GPU, and replays it."""

    def __init__(self, update: Update, device: torch.device) -> None:
        self.update, self.device = update, device
        self.rate = torch.zeros((), device=device)
        self.inputs: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done: StepResult | None = None
        self.warm = 0

    def __call__(self, inputs: tuple[Tensor, ...], rate: float) -> StepResult:
        """One update with these inputs, which have the same shapes every time."""
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
            done = self.run_aside()
            self.warm += 1  # only now: an update that ran out of memory is tried again
            return done
        self.graph = torch.cuda.CUDAGraph()
        # Other threads are not recorded: a loader's thread pins the next batches meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.done = self.update(self.inputs, self.rate)
        self.graph.replay()
        return self.done

    def run_aside(self) -> StepResult:
        """The update itself, on a side stream, as it will be recorded."""
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            done = self.update(self.inputs, self.rate)
        current.wait_stream(side)
        return done


class TrainingStep:
    """Adds the gradients of sums over micro-batches and processes, then divides once by the global count. If loss or
    gradient is not finite, the update is skipped: decided on the device, counted when metrics are read. With `graphs`
    everything but the inputs is recorded once and replayed; micro-batches then draw their random numbers in turn."""

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
        self.recordings: dict[int, RecordedUpdate] = {}  # by micro-batch, which may shrink in the first steps

    def __call__(self, batch: Batch, *, step: int, rate: float, micro: int) -> StepResult:
        inputs = self.objective.inputs(batch, seed=self.seed, step=step)
        if self.graphs:
            self.world.count_collective()  # a recording does not count its collectives
            seed_generators(self.world.device, self.seed, step, self.world.rank, 0)
            done = self.get_recording(micro)(inputs, rate)
        else:
            done = self.update(inputs, rate, step, micro)
        self.objective.after_step(step)
        return done

    def get_recording(self, micro: int) -> RecordedUpdate:
        if micro not in self.recordings:
            update = partial(self.update, step=None, micro=micro)
            self.recordings = {micro: RecordedUpdate(update, self.world.device)}
        return self.recordings[micro]

    def update(self, inputs: tuple[Tensor, ...], rate: float | Tensor, step: int | None, micro: int) -> StepResult:
        output = self.compute_gradients(inputs, step, micro)
        sums = torch.stack([output.total, output.count, *output.tallies.values()]).float()
        self.world.sum_(sums)
        count = sums[1].clamp(min=1.0) / self.parallel.gradient_factor
        norm = total_norm(self.optimiser.gradients()) / count
        ok = norm.isfinite() & sums[0].isfinite()
        self.optimiser.step(rate, divisor=count / clip_factor(norm, self.clip), ok=ok)
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
                seed_generators(self.world.device, self.seed, step, self.world.rank, at)
            with self.parallel.micro(last=at == len(parts) - 1):
                output: ObjectiveOutput = self.parallel(*part)
                output.total.backward()
            tallies = {name: value.detach() for name, value in output.tallies.items()}
            outputs.append(ObjectiveOutput(output.total.detach(), output.count.detach(), tallies))
        return sum_outputs(outputs)


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


def sum_outputs(outputs: Sequence[ObjectiveOutput]) -> ObjectiveOutput:
    if len(outputs) == 1:
        return outputs[0]
    return ObjectiveOutput(
        total=torch.stack([one.total for one in outputs]).sum(),
        count=torch.stack([one.count for one in outputs]).sum(),
        tallies={name: torch.stack([one.tallies[name] for one in outputs]).sum() for name in outputs[0].tallies},
    )
