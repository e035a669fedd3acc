"""One update: micro-batches, their sum, clipping, the optimiser, the average. Nothing here waits for the device."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vitrail.data.draws import keyed, number
from vitrail.data.loader import Batch
from vitrail.distributed.parallel import Parallel
from vitrail.distributed.world import World
from vitrail.objectives.objective import Objective, Outcome
from vitrail.optim.averaging import Average
from vitrail.optim.clipping import clip_factor, total_norm
from vitrail.optim.optimiser import Optimiser
from vitrail.train.done import Done
from vitrail.train.recording import Recording


class Step:
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
        self.recordings: dict[int, Recording] = {}  # by micro-batch: in the first steps one may prove too large

    def __call__(self, batch: Batch, *, step: int, rate: float, micro: int) -> Done:
        inputs = self.objective.inputs(batch, seed=self.seed, step=step)
        if self.graphs:
            self.world.moved()  # a recording does not say so
            seed_generators(self.world.device, self.seed, step, self.world.rank, 0)
            done = self.recording(micro)(inputs, rate)
        else:
            done = self.update(inputs, rate, step, micro)
        self.objective.stepped(step)
        return done

    def recording(self, micro: int) -> Recording:
        if micro not in self.recordings:
            update = partial(self.update, step=None, micro=micro)
            self.recordings = {micro: Recording(update, self.world.device)}
        return self.recordings[micro]

    def update(self, inputs: tuple[Tensor, ...], rate: float | Tensor, step: int | None, micro: int) -> Done:
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
        return Done(("total", "count", *outcome.tallies), sums, norm, ok)

    def gradients(self, inputs: tuple[Tensor, ...], step: int | None, micro: int) -> Outcome:
        """Forward and backward over the micro-batches; the outcome is this process's sum. Without a `step` random
        numbers are drawn as the generators stand."""
        parts = divided(inputs, micro)
        outcomes: list[Outcome] = []
        for at, part in enumerate(parts):
            if step is not None:
                seed_generators(self.world.device, self.seed, step, self.world.rank, at)
            with self.parallel.micro(last=at == len(parts) - 1):
                outcome: Outcome = self.parallel(*part)
                outcome.total.backward()
            outcomes.append(detached(outcome))
        return summed(outcomes)


def divided(inputs: tuple[Tensor, ...], micro: int) -> list[tuple[Tensor, ...]]:
    """The inputs in runs of `micro` samples."""
    return list(zip(*(tensor.split(micro) for tensor in inputs), strict=True))


def seed_generators(device: torch.device, seed: int, step: int, rank: int, part: int) -> None:
    """Dropout and the like draw from torch's generators: set from where we are, never saved. Those of other devices
    stay as they are: to set them, too, as `torch.manual_seed` does, takes most of a millisecond."""
    key = int(keyed(number("step"), seed, step, rank, part)[0] >> 1)
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    elif device.type == "mps":
        torch.mps.manual_seed(key)


def detached(outcome: Outcome) -> Outcome:
    """Without what led to it."""
    tallies = {name: value.detach() for name, value in outcome.tallies.items()}
    return Outcome(outcome.total.detach(), outcome.count.detach(), tallies)


def summed(outcomes: Sequence[Outcome]) -> Outcome:
    if len(outcomes) == 1:
        return outcomes[0]
    return Outcome(
        total=torch.stack([one.total for one in outcomes]).sum(),
        count=torch.stack([one.count for one in outcomes]).sum(),
        tallies={name: torch.stack([one.tallies[name] for one in outcomes]).sum() for name in outcomes[0].tallies},
    )
