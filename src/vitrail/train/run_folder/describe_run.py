"""Describes a run from its folder alone: its state, what is kept, and what to type next."""

import math
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints, list_unfinished
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.unreadable_log import FILE as UNREADABLE
from vitrail.data.unreadable_log import read_log
from vitrail.evaluation.metrics import Criterion
from vitrail.tasks.registry import TASKS
from vitrail.train.run_folder import files, metric_rows
from vitrail.train.run_folder.files import BEST, METRICS, STATUS, SWEEP, is_held, read_status
from vitrail.train.run_folder.metric_rows import Row

SHOWN: Final = 6  # numbers of a row
NOTES: Final = 3  # last lines of the log


def describe_run(path: Path) -> str:
    """The state of a run, what is kept of it, and what to type next."""
    command = files.read_command(path)
    if (path / SWEEP).exists() and not (path / STATUS).exists():
        return _describe_sweep(path, command)
    status, rows, checkpoints = read_status(path), files.read_rows(path / METRICS), list_checkpoints(path / FOLDER)
    lines = [f"message: {status['message']}"] if status.get("message") else []
    lines += [f"last metrics: {_describe_row(rows[-1])}"] if rows else []
    lines += _describe_scores(path, rows)
    kept = f"the newest is of step {max(checkpoints):,} ({len(checkpoints)} in all)" if checkpoints else "none yet"
    if not is_held(path) and (cut_off := list_unfinished(path / FOLDER)):
        kept += f"; the save of step {cut_off[-1]:,} was cut off, which does no harm"
    lines.append(f"checkpoints: {kept}")
    if weights := [name for name in (BEST, files.LAST) if (path / name).exists()]:
        lines.append(f"weights: {', '.join(weights)}")
    if (path / UNREADABLE).exists():
        try:
            count = len(read_log(path / UNREADABLE))
            lines += [f"unreadable images: {count}, listed in {UNREADABLE}"] if count else []
        except (DataError, OSError) as error:
            lines.append(f"unreadable images: {error}")
    if status.get("state") != "done":
        lines += [f"log: {line}" for line in _read_tail(path / files.LOG)]
        go_on = status.get("next") or command.get("go_on")
        if go_on and not is_held(path) and status.get("state") != "diverged":  # it would only diverge again
            lines.append(f"{'resume' if checkpoints else 'start again'} with: {go_on}")
    if (path / "report.html").exists():
        lines.append(f"report: {path / 'report.html'}")
    return "\n  ".join([f"{path}: {_describe_state(path, status, rows)}", *lines])


def _describe_sweep(path: Path, command: dict[str, Any]) -> str:
    """A sweep whose last run has not started."""
    found = files.read_json(path / SWEEP)
    lines = [f"{path}: a sweep, {len(found['tried'])} of {found['points']} points tried"]
    lines += [f"{','.join(row['settings'])}: {_describe_point(row)}" for row in found["tried"]]
    busy = [place.parent for place in (path / files.POINTS).rglob(files.LOCK) if is_held(place.parent)]
    lines += [f"now: {describe_run(place)}" for place in busy]
    if not busy and command.get("go_on"):
        lines.append(f"resume with: {command['go_on']}")
    return "\n  ".join(lines)


def _describe_point(row: dict[str, Any]) -> str:
    """The score of a point of a sweep; its key names the split and the number: "dev accuracy"."""
    key, score = next((name, value) for name, value in row.items() if name != "settings")
    split, _, title = key.partition(" ")
    if isinstance(score, str):  # it diverged, or in the words of earlier versions exploded
        return "diverged"
    known = (one for one in metric_rows.known_measures().values() if metric_rows.title_of(one) == title)
    criterion = next(known, Criterion(name=title))
    text = metric_rows.write_value(criterion, score)
    return f"{text} of {split}" if criterion.name == metric_rows.ACCURACY else f"{split} {title} {text}"


def _describe_state(path: Path, status: dict[str, Any], rows: list[Row]) -> str:
    """The state and the step."""
    state, who, updated = status.get("state"), status or files.read_holder(path), status.get("updated", "?")
    process = f"process {who.get('pid', '?')} on {who.get('host', '?')}"
    reached = _describe_step(status, rows)
    over = {"done": "done", "interrupted": "interrupted by a signal", "failed": "failed with an error"}
    over["diverged"] = "diverged: loss, gradient or weights were no longer finite"
    if state in over:
        return f"{over[state]}, {reached}, at {updated}"
    if is_held(path):
        what = {"running": "running", "preparing": "being prepared"}.get(state or "", "in use")
        return f"{what}, {reached}, by {process}"
    if state == "preparing":
        return f"was killed while it was being prepared, {reached}; {process} is gone"
    if state == "running":
        return f"was killed (by a signal that nothing can catch, or with its machine), {reached}; {process} is gone"
    return f"no longer in use, {reached}; {STATUS} cannot be read, as after a power cut"


def _describe_step(status: dict[str, Any], rows: list[Row]) -> str:
    """The furthest step that any file in the folder mentions."""
    known = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    step = max([int(status.get("step") or 0), *known])
    steps = status.get("steps")
    if not step:
        return "before its first step" if status.get("state") != "done" else "0 steps"
    return f"step {step:,} of {steps:,}" if isinstance(steps, int) else f"step {step:,}"


def _describe_row(row: Row) -> str:
    """The first numbers of a row, by their display names; missing numbers are left out."""
    titles = metric_rows.known_titles()
    numbers = [
        f"{titles.get(name, name)} {f'{value:.4g}' if isinstance(value, float) and math.isfinite(value) else value}"
        for name, value in row.items()
        if name not in ("step", "kind", "score") and value is not None and not isinstance(value, dict | list)
    ]
    return f"step {row.get('step', '?')}: {', '.join(numbers[:SHOWN])}"


def _describe_scores(path: Path, rows: list[Row]) -> list[str]:
    """The scores of the weights that the run stands for: the best ones if it selected some, else the last."""
    watched, tested = metric_rows.scores(rows, "watch"), metric_rows.scores(rows, "test")
    known = [task.criteria for task in TASKS.values()]  # of an unregistered task nobody knows which score is better
    chooses = (path / BEST).exists() and all(metric_rows.criteria_of(row) in known for row in watched)
    if chooses and watched:
        watched = [metric_rows.best_of(watched)]
    best = {row.get("step") for row in watched} if chooses else set[Any]()
    lines: list[str] = []
    for row in {row.get("split"): row for row in (*watched[-1:], *tested[-1:])}.values():
        first, count, step = metric_rows.headline(row), row.get("count", "?"), row.get("step", "?")
        assert first is not None
        score = f"{first.text} of {count}" if first.is_accuracy else f"{first.name} {first.text}"
        if not first.is_accuracy and isinstance(count, int):
            score += f" ({count:,} images)"
        chosen = ", the best" if step in best else ""
        lines.append(f"{row.get('split', 'score')}: {score} with the weights of step {step}{chosen}")
    return lines


def _read_tail(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()[-NOTES:] if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
