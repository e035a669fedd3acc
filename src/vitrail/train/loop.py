"""The training loop. It depends neither on the objective nor on the number of processes.

    with joined() as world:
        result = train(run, out=Path("runs/mine"), world=world)

The same call again resumes: on a CPU it ends with the same weights, bit for bit. The learning rate of a step comes from
`optim/schedules.py`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.store.layout import FOLDER
from vitrail.checkpoint.store.reader import SavedCheckpoint
from vitrail.checkpoint.store.writer import CheckpointWriter
from vitrail.core.errors import DataError, Diverged, OutOfMemory, TrainingError, VitrailError
from vitrail.core.text import pluralise
from vitrail.data.loader import Batch, name_dead_worker
from vitrail.data.randomness import EpochOrder
from vitrail.data.training_record import KEY
from vitrail.data.unreadable_log import UnreadableLog
from vitrail.distributed.process_group import FlagSync, World
from vitrail.optim.schedules import Rates, learning_rates
from vitrail.report.sections import State
from vitrail.tasks.registry import task_of
from vitrail.train.assemble import Parts, assemble
from vitrail.train.closed_form_baseline import compare_scores, find_obstacle, prepare_baseline
from vitrail.train.config import ResolvedRun, Run
from vitrail.train.data import DataSplits, open_splits, record_training_images, warn_of_seen_images
from vitrail.train.metrics import Meter, MetricsSnapshot, Throughput
from vitrail.train.observer import STEP, NullObserver, Observer, get_advance, listen_for_signals
from vitrail.train.report.page import present
from vitrail.train.resolve import balance_micro_batch, count_micro_batches, resolve, summarise_run
from vitrail.train.resume import find_checkpoint, find_non_finite, open_folder, own_pieces
from vitrail.train.run_folder.files import BEST, LAST, METRICS, to_json_value
from vitrail.train.run_folder.metric_rows import describe_score, read_metrics
from vitrail.train.run_folder.run import RunFolder, write_weights
from vitrail.train.scoring import Best, Scorer, SplitScore, TrainingResult, check_fewshot, score_final_weights

FIRST_STEPS = 3  # in these, running out of memory leads to smaller micro-batches
REPORT_S = 60.0  # between two reports while nothing is scored
GENTLER = "Start again, or resume with --force, with a lower optim.lr, a longer schedule.warmup, or optim.clip=1"


def train(
    run: Run,
    *,
    out: Path,
    world: World,
    command: dict[str, Any] | None = None,
    force: bool = False,
    observer: Observer | None = None,
    splits: DataSplits | None = None,
    why: Sequence[str] = (),
) -> TrainingResult:
    """Trains, or resumes, in the folder `out`. `why` are notes on how the run was planned."""
    observer = observer or NullObserver()
    splits = splits or open_splits(run.data, task_of(run.objective))
    resolved = resolve(run, splits, world)
    if run.evaluation.fewshot:
        check_fewshot(run.evaluation)
    with open_folder(out, resolved, splits, world, command=command or {}, force=force, log=observer.log) as folder:
        for text in (*why, *summarise_run(resolved, splits, world, out)):
            folder.note(text)
        if run.baseline == "auto" and run.weights and resolved.baseline == "off":
            folder.note(f"no linear classifier to compare with: {find_obstacle(run, splits)}")
        folder.warnings = []  # the report shows what comes up from here on
        training: Training | None = None
        try:
            training = Training(resolved, splits, world, folder, observer, micro=run.micro)
            folder.write_tables()
            result = training.run()
            training.store.close()
            return result
        except Diverged as error:
            folder.set_status("diverged", message=str(error))
            world.barrier()  # all processes raise this; one that left would end the one that still writes
            raise
        except KeyboardInterrupt:  # does not wait for a checkpoint in progress: it will be complete or absent
            how = "before the first step" if training is None else "at once by a second signal, without saving"
            folder.set_status("interrupted", message=f"stopped {how}")
            raise
        except BaseException as error:
            cause = name_dead_worker(error)
            if training is not None:
                training.store.close()  # finishes a checkpoint in progress before the folder is released
            message = describe_failure(cause, world.size)
            if folder.exists():
                folder.set_status("failed", message=message)
                if training is not None and not isinstance(cause, TrainingError):  # those have reported already
                    training.report("failed", message)
                folder.log(f"failed: {message}")
            if type(cause) is TrainingError:
                world.barrier()
            if cause is not error:
                raise cause from error
            raise


def describe_failure(error: BaseException, processes: int) -> str:
    """An error in one line. With several processes, the first to notice a loss rarely knows which one it was."""
    text = str(error) if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}"
    if processes > 1 and isinstance(error, RuntimeError) and any(name in text.lower() for name in ("gloo", "nccl")):
        return f"another process of the job was lost, and the job's output says which ({text})"
    return text


class Training:
    """A run in progress: its parts, its position and its results so far."""

    def __init__(
        self, config: ResolvedRun, splits: DataSplits, world: World, folder: RunFolder, observer: Observer, micro: int
    ) -> None:
        """`micro` is as requested, 0 for automatic: a resumed run keeps its own unless another one is requested."""
        self.config, self.splits, self.world, self.folder, self.observer = config, splits, world, folder, observer
        self.advance = get_advance(observer)
        tell = lambda entry: folder.note(f"skipped an unreadable image: {entry}")  # noqa: E731
        self.ledger = UnreadableLog(folder.path if world.is_main else None, strict=config.data.strict, tell=tell)
        token, keep = world.broadcast(f"{time.time_ns():x}"), config.keep.last
        self.store = CheckpointWriter(
            folder.path / FOLDER, rank=world.rank, world=world.size, token=token, keep=keep, tell=folder.note
        )
        saved = find_checkpoint(folder, world)
        self.trained_on = record_training_images(config.data, splits, world, saved, self.advance)
        self.baseline, head = prepare_baseline(config, splits, world, folder, observer, resumed=saved is not None)
        self.parts: Parts = assemble(config, splits, world, self.ledger, saved=saved, head=head)
        self.micro, self.best, self.step = config.micro, Best(), 0
        self.meter, self.throughput = Meter(world.device), Throughput(self.parts.cost, config.batch)
        self.scorer = Scorer(self.parts, self.advance)
        self.flags = FlagSync(world)
        self.rows: dict[str, dict[str, Any]] = {}  # the last scores, by kind
        self.shown: SplitScore | None = None  # what the report shows: the best weights, once there are some
        if saved is None:
            provenance = {**get_card(self.network).provenance, KEY: self.trained_on}
            warn_of_seen_images(splits, provenance, world, folder.note)
            self.folder.rewind(0)  # a start that was killed before its first checkpoint may have left rows
            if world.is_main:
                (folder.path / BEST).unlink(missing_ok=True)  # or best weights
        else:
            self.restore_from(saved, micro)
        self.saved_at, self.reported_at = time.monotonic(), time.monotonic()
        self.skipped_before, self.empty_steps = 0, 0

    @property
    def network(self) -> Any:
        return self.parts.objective.eval_network

    def restore_from(self, saved: SavedCheckpoint, micro: int) -> None:
        """Restores everything but the tensors, which `assemble` has restored already."""
        facts = saved.facts
        self.network.card = replace(get_card(self.network), provenance=facts["provenance"])  # the first may be gone
        self.step, self.best = saved.step, Best.from_facts(facts["best"])
        self.parts.objective.set_progress(saved.step)
        self.micro = int(facts["micro"]) if micro in (0, facts["chosen"]) else micro
        self.parts.cost.restore(facts["cost"])
        self.meter.restore(facts.get("meter", {}))  # checkpoints of 0.1.0 have none
        self.folder.rewind(saved.step)
        scores = [row for row in read_metrics(self.folder.path / METRICS)[0] if row["kind"] in ("watch", "fewshot")]
        self.rows = self.world.broadcast({row["kind"]: row for row in scores})
        self.folder.note(f"resumes from step {saved.step:,} of {self.config.steps:,}")

    def run(self) -> TrainingResult:
        """Trains step by step, and reads metrics, scores and saves from time to time."""
        ending = "early" if self.is_out_of_patience else ""  # a resumed run may have nothing left to train
        self.folder.set_status("running", step=self.step, total=self.config.steps)
        with listen_for_signals() as stop:
            self.advance(STEP, self.step, self.config.steps)
            if self.step == 0 and self.config.start == "closed-form":
                self.evaluate()  # the start is a classifier already, and may be the best
            self.throughput.start()
            for batch in () if ending else self.batches():
                self.update(batch)
                self.read_metrics()
                if self.step % self.config.evaluation.every == 0 or self.step == self.config.steps:
                    self.evaluate()
                stopping, save = self.flags(self.step, (bool(stop), self.world.is_main and self.is_save_due()))
                if self.step == self.config.steps or self.is_out_of_patience:
                    ending = "done" if self.step == self.config.steps else "early"
                elif stopping:
                    ending = "interrupted"
                if ending or save or (self.config.keep.steps and self.step % self.config.keep.steps == 0):
                    self.save()
                if ending:
                    break
            return self.finish(ending)

    def batches(self) -> Iterator[Batch]:
        """The batches from the current step on. If the data fail, saves the weights before the error is raised."""
        try:
            yield from self.parts.batches.iterate(self.step, self.config.steps)
        except DataError:
            if self.step and self.world.size == 1:  # other processes would wait for this one
                self.save()
                self.store.wait()
            raise

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self.config.evaluation.patience <= self.best.since

    def learning_rates(self, step: int) -> Rates:
        return learning_rates(step, self.config.schedule, base=self.config.optim.lr, total=self.config.steps)

    def update(self, batch: Batch) -> None:
        """One step; in the first few, running out of memory halves the micro-batches and repeats the step."""
        rates = self.learning_rates(batch.step)
        while True:
            try:
                result = self.parts.step(batch, step=batch.step, rates=rates, micro=self.micro)
                break
            except torch.OutOfMemoryError as error:
                micro, couples = min(self.micro, len(batch)), self.parts.objective.config.needs_whole_batch
                if self.throughput.steps >= FIRST_STEPS or self.world.size > 1 or micro == 1 or couples:
                    remedy = f"resume with the same command and --set micro={micro // 2}"
                    if couples:
                        remedy = "they cannot be split: use a smaller batch, more processes or --set recompute=true"
                    elif micro == 1:
                        remedy = "use --set recompute=true, --set sharding=fsdp on several devices, or fewer tokens"
                    fault = f"out of memory at step {batch.step:,} with {pluralise(micro, 'image')} at once"
                    raise OutOfMemory(f"{fault}; {remedy}") from error
                self.parts.optimiser.zero_grad()
                torch.cuda.empty_cache()
                self.micro = balance_micro_batch(len(batch), micro // 2)
                how = f"{self.micro}, in {count_micro_batches(len(batch), self.micro)} micro-batches per step"
                self.folder.note(f"out of memory with {micro} images at once: continuing with {how}")
        self.meter.add(batch.step, result.names, result.sums, result.norm, result.ok)
        self.step = batch.step + 1
        self.throughput.count_step(self.parts.step.building_s)
        self.advance(STEP, self.step, self.config.steps)

    def read_metrics(self) -> None:
        """Every `log` steps, starts copying the sums and records those sent the time before; on a CPU, both at once."""
        if self.step % self.config.log and self.step != self.config.steps:
            return
        self.record_sent()
        self.meter.send(self.step)
        if self.world.device.type == "cpu":
            self.record_sent()

    def record_sent(self, *, last: bool = False) -> None:
        if (snapshot := self.meter.read()) is not None:
            self.record(snapshot, last=last)

    def record(self, snapshot: MetricsSnapshot, *, last: bool) -> None:
        """Writes a row of metrics to the file, to TensorBoard and to the observer. DataError if a whole epoch, or the
        whole run, had no usable image: all were unreadable or without a target."""
        speed = self.throughput.update(snapshot.steps, last=last)
        row: dict[str, Any] = {"kind": "train", "step": snapshot.step}
        row |= {"epoch": snapshot.step * self.config.batch / len(self.splits.train), "loss": snapshot.mean("total")}
        row |= {name: snapshot.mean(name) for name in snapshot.values if name not in ("total", "count")}
        row |= {"lr": self.learning_rates(snapshot.step - 1).head, "norm": snapshot.norm, "skipped": snapshot.skipped}
        row |= speed | self.parts.cost.row()
        self.folder.record(row)
        left = (self.config.steps - self.step) * self.config.batch
        left_s = left / speed["images_per_s"] if speed.get("images_per_s") else float("nan")
        self.observer.progress({**row, "steps": self.config.steps, "best": self.best.values, "left_s": left_s})
        more, images = snapshot.skipped - self.skipped_before, len(self.splits.train)
        self.empty_steps = 0 if snapshot.values["count"] or more else self.empty_steps + snapshot.steps
        if self.empty_steps * self.config.batch >= min(images, self.config.steps * self.config.batch):
            why = f"see {self.folder.path / 'unreadable.jsonl'}" if len(self.ledger) else "all their labels are ignored"
            raise DataError(f"none of the {images:,} training images could be used: {why}")
        if more > 0:
            self.skipped_before = snapshot.skipped
            skipped = f"skipped {pluralise(more, 'update')} up to step {snapshot.step:,}"
            which = f"first at step {snapshot.first_bad:,}, counted from 0; {snapshot.skipped} in all"
            end = f"({which}, {self.config.bad_steps} end the run)"
            self.folder.note(f"{skipped}: loss or gradient was not finite {end}")
        if snapshot.skipped >= self.config.bad_steps:
            self.diverge(snapshot)
        if time.monotonic() - self.reported_at > REPORT_S:
            self.report("running")

    def evaluate(self) -> None:
        """Scores the watched split, keeps the best weights, and computes few-shot accuracy."""
        self.check_folder()
        rows: list[dict[str, Any]] = []
        is_watching, can_select = self.splits.watch is not None, self.splits.can_select_best
        with self.throughput.pause():
            if is_watching:
                rows.append(self.scorer.score("watch", self.step))
            elif not self.config.objective.labelled:
                rows.append(self.scorer.score_training_images(self.step))
            if self.config.evaluation.fewshot:
                rows += self.scorer.score_few_shot(self.step)
            for row in rows:
                self.folder.record(row, describe_score(row))
                self.observer.progress(row)
                self.rows[row["kind"]] = row
            row = self.rows.get("watch", {}) if is_watching else {}
            is_better = self.best.update(row, self.scorer.task.criteria, self.step)
            if is_better and can_select:
                self.write(BEST, row)
            if is_better or not can_select or self.shown is None:
                self.shown = self.scorer.latest
            if rows:
                self.report("running")

    def is_save_due(self) -> bool:
        """Whether the clock asks for a checkpoint, or for another attempt at one; only the main process decides."""
        if self.store.failing:
            return self.store.retry_due()
        return not self.config.keep.steps and time.monotonic() - self.saved_at > 60 * self.config.keep.minutes

    def save(self) -> None:
        """Hands a copy of the state to the writer, which works while the run continues."""
        self.check_folder()
        self.record_sent()  # a kill would lose a row still in transit
        cost, meter = self.throughput.cost_so_far().state(), self.meter.state()
        facts = {"micro": self.micro, "chosen": self.config.micro, "best": asdict(self.best), "cost": cost}
        facts |= {"meter": meter, "provenance": get_card(self.network).provenance, KEY: self.trained_on}
        self.store.save(self.step, own_pieces(self.parts.state(), self.world), facts)
        self.saved_at = time.monotonic()
        self.folder.set_status("running", step=self.step, total=self.config.steps)

    def finish(self, ending: str) -> TrainingResult:
        """The last metrics, the weights, the final score and the report."""
        self.record_sent(last=True)
        is_saved = self.store.wait()
        state: State = "interrupted" if ending == "interrupted" else "done"
        watched = self.rows.get("watch")
        current = watched if watched is not None and watched["step"] == self.step else None
        is_written = self.world.broadcast(self.write(LAST, current))
        if not self.world.broadcast(is_written and is_saved):
            self.fail(is_written)
        if state == "done":
            row, self.shown = score_final_weights(self.scorer, self.folder, self.step, current, self.shown)
            if row is not None:
                self.folder.record(row, describe_score(row))
                if self.splits.watch_name != self.splits.test_name:
                    self.observer.progress(row)
                self.rows["test"] = row
            best = self.best.apply_to(watched) if self.splits.can_select_best else watched
            if worse := compare_scores(self.baseline, (row, best), self.config):
                self.folder.note(worse)
        messages = {
            "interrupted": f"stopped by a signal after step {self.step:,} of {self.config.steps:,}, saved",
            "early": f"stopped early at step {self.step:,}: {self.best.since} scorings without a better one",
        }
        message = messages.get(ending, f"all {self.config.steps:,} steps done")
        self.folder.set_status(state, step=self.step, total=self.config.steps, message=message)
        self.report(state, "" if ending == "done" else message)
        self.folder.log(message)
        watched, tested = self.rows.get("watch"), self.rows.get("test")
        return TrainingResult(self.folder.path, state, self.step, self.best, tested, watched, self.baseline)

    def fail(self, is_written: bool) -> None:
        """Raises if the end could not be written: Diverged if the weights are not finite, else TrainingError."""
        self.check_folder()
        kept = self.world.broadcast(self.store.newest())
        faults = self.world.gather(find_non_finite(self.parts.state()))
        intact = "there is no earlier checkpoint" if kept is None else f"the checkpoint of step {kept:,} is intact"
        reached = f"step {self.step:,} of {self.config.steps:,} was reached, but its"
        if fault := next(filter(None, faults), ""):
            reason = f"weights have overflowed ({fault}), so they were not written"
            self.raise_diverged(f"{reached} {reason}; {intact}. {GENTLER}")
        what = f"checkpoint could not be written ({LAST} was)" if is_written else "weights could not be written"
        message = f"{reached} {what}; {intact}. The log says why. Free some disk space and resume with the same command"
        self.report("failed", message)
        raise TrainingError(message)

    def check_folder(self) -> None:
        """TrainingError if the run folder was removed or moved: nothing could be saved any more."""
        if self.world.broadcast(not self.folder.exists()):
            when = f"while the run was at step {self.step:,} of {self.config.steps:,}"
            raise TrainingError(f"{self.folder.path} was removed or moved {when}; start again with the same command")

    def write(self, name: str, row: dict[str, Any] | None) -> bool:
        """Writes a weight file with its provenance and the cost so far; returns whether it succeeded."""
        run, cost = self.config, self.throughput.cost_so_far().row()
        provenance = {"run": run.name, "data": run.data.source, "seed": run.seed, "step": self.step, "cost": cost}
        provenance |= {**self.splits.provenance, KEY: self.trained_on}
        if row is not None:
            provenance["score"] = to_json_value(self.scorer.summarise(row))
        with self.scorer.use_average():
            try:
                write_weights(self.folder.path / name, self.network, self.world, provenance)
            except (OSError, VitrailError) as error:
                self.folder.note(f"{name} could not be written: {error}")
                return False
        return True

    def report(self, state: State, message: str = "") -> None:
        """Writes the report; a failure is noted once, and does not stop the run."""
        self.reported_at = time.monotonic()
        if not self.world.is_main:
            return
        chosen = self.best.step if (self.folder.path / BEST).exists() else -1
        with self.folder.failures.note_once("report.html could not be written", "the run continues"):
            present(self.folder, self.parts, self.shown, state, message, step=self.step, chosen=chosen)

    def diverge(self, snapshot: MetricsSnapshot) -> None:
        """Too many updates were skipped: saves the weights, which these never touched, and names the bad batch."""
        at = np.arange(self.config.batch, dtype=np.int64) + snapshot.first_bad * self.config.batch
        order = EpochOrder(len(self.splits.train), self.config.seed, self.config.data.repeats).locate(at)
        names = [self.splits.train.name(int(sample)) for sample in order.sample]
        self.folder.write_json("bad_batch.json", {"step": snapshot.first_bad, "pictures": names})
        self.save()
        kept = self.step if self.store.wait() else self.store.last
        self.write(LAST, None)
        weights = "nothing had been saved" if kept is None else f"the weights of step {kept} are kept"
        again = f"`vitrail replay {self.folder.path} --step {snapshot.first_bad}` runs that batch again"
        bad = f"loss or gradient was not finite in {snapshot.skipped} updates, first at step {snapshot.first_bad}"
        self.raise_diverged(f"{bad}; {weights}. {again}; its images are in bad_batch.json. {GENTLER}")

    def raise_diverged(self, message: str) -> NoReturn:
        self.folder.log(message)
        self.report("diverged", message)
        raise Diverged(message)
