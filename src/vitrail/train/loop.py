"""The one loop. It is blind to the objective, and to how many processes there are.

    with joined() as world:
        result = train(run, out=Path("runs/mine"), world=world)

The same call again goes on where the last one stopped: on a CPU to the very same weights, bit by bit.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from vitrail.checkpoint.store.reader import SavedCheckpoint
from vitrail.checkpoint.store.writer import CheckpointWriter
from vitrail.core.errors import DataError, Diverged, OutOfMemory, TrainingError, VitrailError
from vitrail.data.loader import Batch, name_dead_worker
from vitrail.data.randomness import EpochOrder
from vitrail.data.unreadable_log import UnreadableLog, UnreadableSample
from vitrail.distributed.collectives import FlagSync
from vitrail.distributed.process_group import World
from vitrail.optim.schedules import learning_rate
from vitrail.report.sections import State
from vitrail.tasks.registry import task_of
from vitrail.train import metrics as memory
from vitrail.train import observer as messages
from vitrail.train import observer as signals
from vitrail.train.assemble import Parts, assemble
from vitrail.train.closed_form_baseline import compare_scores, find_obstacle, prepare_baseline
from vitrail.train.config import ResolvedRun, Run
from vitrail.train.data import KEY, DataSplits, open_splits, record_training_images, warn_of_seen_images
from vitrail.train.metrics import Meter, MetricsSnapshot, Throughput
from vitrail.train.observer import STEP, NullObserver, Observer, get_advance
from vitrail.train.report.page import METRICS, read_metrics
from vitrail.train.report_inputs import present
from vitrail.train.resolve import resolve, summarise_run
from vitrail.train.resume import collect_state, find_checkpoint, find_non_finite, open_folder, own_pieces
from vitrail.train.run_folder.files import BEST, LAST, to_json_value
from vitrail.train.run_folder.metric_rows import describe_score
from vitrail.train.run_folder.run import RunFolder, get_provenance, set_provenance, write_weights
from vitrail.train.scoring import Best, Scorer, SplitScore, TrainingResult, check_fewshot, score_final_weights

FIRST_STEPS = 3  # in which running out of memory is answered by smaller micro-batches
REPORT_S = 60.0  # between two reports while nothing is scored


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
    """Trains, or goes on training, in the folder `out`. `why` is what a person should know of the run's making."""
    observer = observer or NullObserver()
    splits = splits or open_splits(run.data, task_of(run.objective))
    resolved = resolve(run, splits, world)
    if run.evaluation.fewshot:
        check_fewshot(run.evaluation)  # one that is not there, or too small, is said before the first step
    with open_folder(out, resolved, splits, world, command=command or {}, force=force, tell=observer.log) as folder:
        for text in (*why, *summarise_run(resolved, splits, world, out)):
            folder.note(text)
        if run.baseline == "auto" and run.weights and resolved.baseline == "off":
            folder.note(f"no linear classifier to compare with: {find_obstacle(run, splits)}")
        folder.warnings = []  # the report shows what comes up from here on
        training: Training | None = None
        try:
            training = Training(resolved, splits, world, folder, observer, micro=run.micro)
            folder.taken_up()
            result = training.go()
            training.close()
            return result
        except Diverged as error:
            folder.status("diverged", message=str(error))
            world.barrier()  # all of them raise this; a process that left would end the one that still writes
            raise
        except KeyboardInterrupt:  # a checkpoint that is being written is not waited for: it is whole or not there
            early = "stopped before the first step"
            late = "stopped at once by a second signal, without saving"
            folder.status("interrupted", message=early if training is None else late)
            raise
        except BaseException as error:
            cause = name_dead_worker(error)
            if training is not None:
                training.close()  # a checkpoint that is being written: the folder is given free behind it
            message = messages.describe_failure(cause, world.size)
            if folder.is_there():
                folder.status("failed", message=message)
                if training is not None and not isinstance(cause, TrainingError):  # those have told it all
                    training.report("failed", message)
                folder.log(f"failed: {message}")
            if type(cause) is TrainingError:
                world.barrier()
            if cause is not error:
                raise cause from error
            raise


class Training:
    """A run in progress: its parts, how far it is, and what becomes of it."""

    def __init__(
        self, run: ResolvedRun, splits: DataSplits, world: World, folder: RunFolder, observer: Observer, micro: int = 0
    ) -> None:
        """`micro` is as asked for, 0 for whatever fits: a resume keeps what it had unless another is asked for."""
        self.run, self.splits, self.world, self.folder, self.observer = run, splits, world, folder, observer
        self.advance = get_advance(observer)
        self.ledger = UnreadableLog(
            folder.path if world.rank == 0 else None, strict=run.data.strict, tell=self.unreadable
        )
        self.store = CheckpointWriter(
            folder.path / "checkpoints",
            rank=world.rank,
            world=world.size,
            token=world.broadcast(f"{time.time_ns():x}"),
            keep=run.keep.last,
            tell=folder.note,
        )
        saved = find_checkpoint(folder, world)
        self.trained_on = record_training_images(run.data, splits, world, saved, self.advance)
        self.baseline = prepare_baseline(run, splits, world, folder, observer, resumed=saved is not None)
        self.parts: Parts = assemble(run, splits, world, self.ledger, saved=saved, head=self.baseline.head)
        self.micro, self.best, self.step = run.micro, Best(), 0
        self.meter, self.pace = Meter(world.device), Throughput(self.parts.cost, run.batch)
        self.scorer = Scorer(
            run=run, parts=self.parts, splits=splits, world=world, ledger=self.ledger, advance=self.advance
        )
        self.accord = FlagSync(world)
        self.rows: dict[str, dict[str, Any]] = {}  # the last scores, by kind
        self.shown: SplitScore | None = None  # what the report shows: of the best weights, once there are some
        if saved is None:
            warn_of_seen_images(
                splits, self.trained_on, get_provenance(self.parts.objective.eval_network), world, folder.note
            )
            self.folder.rewind(0)  # a start that was killed before its first checkpoint may have left rows
            if world.is_main:
                (folder.path / BEST).unlink(missing_ok=True)  # likewise: a run that chooses none has none
        else:
            self.take_up(saved, micro)
        self.saved_at, self.reported_at = time.monotonic(), time.monotonic()
        self.skipped_before, self.empty_steps, self.report_failed = 0, 0, False

    def take_up(self, saved: SavedCheckpoint, micro: int) -> None:
        """Goes on from a checkpoint: its tensors are in place already, here is the rest."""
        facts = saved.facts
        set_provenance(self.parts.objective.eval_network, facts["provenance"])
        self.step, self.best = saved.step, Best.from_facts(facts["best"])
        self.micro = int(facts["micro"]) if micro in (0, facts["chosen"]) else micro
        self.parts.cost.restore(facts["cost"])
        self.meter.restore(facts.get("meter", {}))  # checkpoints of 0.1.0 have none
        self.folder.rewind(saved.step)
        scores = [row for row in read_metrics(self.folder.path / METRICS)[0] if row["kind"] in ("watch", "fewshot")]
        self.rows = self.world.broadcast({row["kind"]: row for row in scores})
        self.folder.note(f"resumes from step {saved.step:,} of {self.run.steps:,}")

    def go(self) -> TrainingResult:
        """The story: step after step, with a look at the metrics, a score and a checkpoint now and then."""
        ending = "early" if self.out_of_patience else ""  # a start that was killed then had nothing left to train
        self.folder.status("running", step=self.step, total=self.run.steps)
        with signals.listen_for_signals() as stop:
            self.advance(STEP, self.step, self.run.steps)
            if self.step == 0 and self.run.start == "closed-form":
                self.evaluate()  # the start is a classifier already, and may be the best
            self.pace.start()
            for batch in () if ending else self.batches():
                self.update(batch)
                self.draw()
                if self.step % self.run.evaluation.every == 0 or self.step == self.run.steps:
                    self.evaluate()
                clock = self.world.is_main and self.clock_says_save()
                stopping, save = self.accord(self.step, (bool(stop), clock))
                ending = self.ending(stopping)
                if ending or save or (self.run.keep.steps and self.step % self.run.keep.steps == 0):
                    self.save()
                if ending:
                    break
            return self.finish(ending)

    def batches(self) -> Iterator[Batch]:
        """From where the run stands. Where the data fail, what has been learnt is saved before the error goes on."""
        try:
            yield from self.parts.feed.stream(self.step, self.run.steps)
        except DataError:
            if self.step and self.world.size == 1:  # others would wait for a process that has nothing to give
                self.save()
                self.store.wait()
            raise

    @property
    def out_of_patience(self) -> bool:
        return 0 < self.run.evaluation.patience <= self.best.since

    def update(self, batch: Batch) -> None:
        """One step; in the first few, out of memory means smaller micro-batches, and the same step again."""
        lr = learning_rate(self.run.schedule, self.run.optim.lr, batch.step, self.run.steps)
        while True:
            try:
                done = self.parts.step(batch, step=batch.step, rate=lr, micro=self.micro)
                break
            except torch.OutOfMemoryError as error:
                taken, couples = min(self.micro, len(batch)), self.parts.objective.config.needs_whole_batch
                late = self.pace.steps >= FIRST_STEPS or self.world.size > 1 or taken == 1
                if late or couples:
                    raise OutOfMemory(messages.describe_out_of_memory(batch.step, taken, couples=couples)) from error
                self.parts.optimiser.zero_grad()
                torch.cuda.empty_cache()
                self.micro = memory.balance_micro_batch(len(batch), taken // 2)
                self.folder.note(
                    messages.describe_smaller_micro(
                        taken, self.micro, memory.count_micro_batches(len(batch), self.micro)
                    )
                )
        self.meter.add(batch.step, done.names, done.sums, done.norm, done.ok)
        self.step = batch.step + 1
        self.pace.stepped()
        self.advance(STEP, self.step, self.run.steps)

    def draw(self) -> None:
        """Every `log` steps: sends off the sums and takes those sent the time before. On a CPU nothing need wait."""
        if self.step % self.run.log and self.step != self.run.steps:
            return
        if (reading := self.meter.read()) is not None:
            self.show(reading)
        self.meter.send(self.step)
        if self.world.device.type == "cpu" and (reading := self.meter.read()) is not None:
            self.show(reading)

    def show(self, reading: MetricsSnapshot, *, last: bool = False) -> None:
        """A row of metrics: to the file, to TensorBoard, to whoever watches."""
        speed = self.pace.drawn(reading.steps, last=last)
        row: dict[str, Any] = {
            "kind": "train",
            "step": reading.step,
            "epoch": reading.step * self.run.batch / len(self.splits.train),
            "loss": reading.loss,
            **{name: reading.mean(name) for name in reading.values if name not in ("total", "count")},
            "lr": learning_rate(self.run.schedule, self.run.optim.lr, reading.step - 1, self.run.steps),
            "norm": reading.norm,
            "skipped": reading.skipped,
            **speed,
            **self.parts.cost.row(),
        }
        self.folder.record(row)
        self.observer.progress({**row, "steps": self.run.steps, "best": self.best.values, "left_s": self.left(speed)})
        self.check_counted(reading)
        if reading.skipped > self.skipped_before:
            more = reading.skipped - self.skipped_before
            self.skipped_before = reading.skipped
            self.folder.note(messages.describe_skipped_updates(more, reading, self.run.bad_steps))
        if reading.skipped >= self.run.bad_steps:
            self.stop_diverged(reading)
        if time.monotonic() - self.reported_at > REPORT_S:
            self.report("running")

    def check_counted(self, reading: MetricsSnapshot) -> None:
        """DataError where a whole epoch had no image to learn from: every one unreadable, or its target empty."""
        empty = not reading.values["count"] and reading.skipped == self.skipped_before
        self.empty_steps = self.empty_steps + reading.steps if empty else 0
        if self.empty_steps * self.run.batch >= len(self.splits.train):
            raise DataError(
                messages.describe_unusable_images(len(self.splits.train), len(self.ledger), self.folder.path)
            )

    def left(self, speed: dict[str, Any]) -> float:
        images = (self.run.steps - self.step) * self.run.batch
        return images / speed["images_per_s"] if speed.get("images_per_s") else float("nan")

    def evaluate(self) -> None:
        """Scores the watched split, keeps the best weights, and takes the few-shot accuracy."""
        self.check_folder()
        rows: list[dict[str, Any]] = []
        with self.pace.paused():
            if self.splits.watch is not None:
                rows.append(self.scorer.score("watch", self.step))
            elif not self.run.objective.labelled:
                rows.append(self.scorer.look(self.step))
            if self.run.evaluation.fewshot:
                rows += self.scorer.fewshot(self.step)
            for row in rows:
                self.folder.record(row, describe_score(row))
                self.observer.progress(row)
                self.rows[row["kind"]] = row
            row = self.rows.get("watch", {}) if self.splits.watch is not None else {}
            better = self.best.take(row, self.scorer.task.criteria, self.step)
            if better and self.splits.can_select_best:
                self.write(BEST, row)
            if better or not self.splits.can_select_best or self.shown is None:
                self.shown = self.scorer.latest
            if rows:
                self.report("running")

    def clock_says_save(self) -> bool:
        """Whether it is time for a checkpoint, or for another try at one; of several processes the first is asked."""
        if self.store.failing:
            return self.store.retry_due()
        return not self.run.keep.steps and time.monotonic() - self.saved_at > 60 * self.run.keep.minutes

    def ending(self, stopping: bool) -> str:
        """Why the run ends here, or nothing."""
        if self.step == self.run.steps:
            return "done"
        if self.out_of_patience:
            return "early"
        return "interrupted" if stopping else ""

    def save(self) -> None:
        """Hands a copy of everything to the writer, which goes to disk while the run goes on."""
        self.check_folder()
        if (reading := self.meter.read()) is not None:
            self.show(reading)  # a row that is on its way would be lost to a kill
        state = collect_state(self.parts.objective, self.parts.optimiser, self.parts.average)
        facts = {
            "micro": self.micro,
            "chosen": self.run.micro,
            "provenance": get_provenance(self.parts.objective.eval_network),
            KEY: self.trained_on,
            "best": asdict(self.best),
            "cost": self.pace.so_far().state(),
            "meter": self.meter.state(),
        }
        self.store.save(self.step, own_pieces(state, self.world), facts)
        self.saved_at = time.monotonic()
        self.folder.status("running", step=self.step, total=self.run.steps)

    def finish(self, ending: str) -> TrainingResult:
        """The last metrics, the weights, the score of the end, the report."""
        last = self.meter.read()
        if last is not None:
            self.show(last, last=True)
        safe = self.store.wait()
        state: State = "interrupted" if ending == "interrupted" else "done"
        watched = self.rows.get("watch")
        current = watched if watched is not None and watched["step"] == self.step else None
        written = self.world.broadcast(self.write(LAST, current))
        if not self.world.broadcast(written and safe):
            self.fail(written)
        if state == "done":
            row, self.shown = score_final_weights(
                self.scorer, self.folder, step=self.step, current=current, shown=self.shown
            )
            if row is not None:
                self.folder.record(row, describe_score(row))
                if self.splits.watch_name != self.splits.test_name:
                    self.observer.progress(row)
                self.rows["test"] = row
            best = self.best.applied_to(watched) if self.splits.can_select_best else watched
            if worse := compare_scores(self.baseline.by_split, (row, best), self.run):
                self.folder.note(worse)
        message = messages.describe_ending(ending, self.step, self.run.steps, self.best.since)
        self.folder.status(state, step=self.step, total=self.run.steps, message=message)
        self.report(state, "" if ending == "done" else message)
        self.folder.log(message)
        return TrainingResult(
            folder=self.folder.path,
            state=state,
            step=self.step,
            best=self.best,
            test=self.rows.get("test"),
            watch=self.rows.get("watch"),
            baseline=self.baseline.by_split,
        )

    def fail(self, written: bool) -> None:
        """At the end nothing may be lost in silence. What cannot be written is the disk's fault or the weights' own."""
        self.check_folder()
        kept = self.world.broadcast(self.store.newest())
        faults = self.world.gather(
            find_non_finite(collect_state(self.parts.objective, self.parts.optimiser, self.parts.average))
        )
        if fault := next(filter(None, faults), ""):
            self.blow_up(messages.describe_overflow(self.step, self.run.steps, fault, kept))
        message = messages.describe_failed_write(self.step, self.run.steps, kept, weights=written)
        self.report("failed", message)
        raise TrainingError(message)

    def check_folder(self) -> None:
        """Ends the run where its folder was removed or moved: nothing could be kept any more."""
        if self.world.broadcast(not self.folder.is_there()):
            raise TrainingError(messages.describe_missing_folder(self.folder.path, self.step, self.run.steps))

    def write(self, name: str, row: dict[str, Any] | None) -> bool:
        """A weight file that describes itself, with what the run has cost so far; whether it could be written."""
        provenance = {
            "run": self.run.name,
            "data": self.run.data.source,
            "seed": self.run.seed,
            "step": self.step,
            "cost": self.pace.so_far().row(),
            **self.splits.provenance,
            KEY: self.trained_on,
            **({} if row is None else {"score": to_json_value(self.scorer.summary_of(row))}),
        }
        with self.scorer.averaged():
            try:
                write_weights(self.folder.path / name, self.parts.objective.eval_network, self.world, provenance)
            except (OSError, VitrailError) as error:
                self.folder.note(f"{name} could not be written: {error}")
                return False
        return True

    def report(self, state: State, message: str = "") -> None:
        self.reported_at = time.monotonic()
        if self.world.rank:
            return
        chosen = self.best.step if (self.folder.path / BEST).exists() else -1
        try:
            present(
                self.folder,
                self.run,
                self.splits,
                self.shown,
                self.ledger,
                self.pace.so_far(),
                state,
                message,
                step=self.step,
                chosen=chosen,
            )
        except OSError as error:
            if not self.report_failed:
                self.folder.note(f"report.html could not be written ({error.strerror or error}); the run goes on")
            self.report_failed = True
        else:
            self.report_failed = False

    def stop_diverged(self, reading: MetricsSnapshot) -> None:
        """Too many updates left out: keeps the weights, which those never touched, and says which batch it was."""
        names = self.samples(reading.first_bad)
        self.folder.write_json("bad_batch.json", {"step": reading.first_bad, "pictures": names})
        self.save()
        kept = self.step if self.store.wait() else self.store.last
        self.write(LAST, None)
        self.blow_up(messages.diverged(reading, kept, self.folder.path))

    def blow_up(self, message: str) -> NoReturn:
        self.folder.log(message)
        self.report("diverged", message)
        raise Diverged(message)

    def samples(self, step: int) -> list[str]:
        """The names of the images of a global step."""
        places = np.arange(step * self.run.batch, (step + 1) * self.run.batch, dtype=np.int64)
        at = EpochOrder(len(self.splits.train), self.run.seed).locate(places, self.run.data.repeats)
        return [self.splits.train.name(int(sample)) for sample in at.sample]

    def unreadable(self, entry: UnreadableSample) -> None:
        self.folder.note(f"unreadable, left out: {entry}")

    def close(self) -> None:
        self.store.close()
