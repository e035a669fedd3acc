"""Describes a run from its folder alone: its state, what is kept, and what to type next."""

import math
from pathlib import Path
from typing import Any, Final

from vitrail.checkpoint.store.layout import FOLDER, list_checkpoints, list_unfinished
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.unreadable_log import FILE as UNREADABLE
from vitrail.data.unreadable_log import read_log
from vitrail.evaluation.metrics import Criterion
from vitrail.train.run_folder.files import (
    BEST,
    LAST,
    LOG,
    METRICS,
    POINTS,
    STATUS,
    SWEEP,
    is_held,
    read_command,
    read_holder,
    read_json,
    read_rows,
    read_status,
)
from vitrail.train.run_folder.files import LOCK as LOCK
from vitrail.train.run_folder.metric_rows import (
    ACCURACY,
    Row,
    best_of,
    headline,
    is_comparable,
    known_measures,
    scores,
    title_of,
    write_value,
)

SHOWN: Final = 6  # numbers of a row
NOTES: Final = 3  # last lines of the log


def describe_run(path: Path) -> str:
    """The state of a run, what is kept of it, and what to type next."""
    command = read_command(path)
    if (path / SWEEP).exists() and not (path / STATUS).exists():
        return _sweep(path, command)
    status, rows = read_status(path), read_rows(path / METRICS)
    checkpoints = list_checkpoints(path / FOLDER)
    lines = [f"{path}: {_ending(path, status, rows)}"]
    if status.get("message"):
        lines.append(f"  message: {status['message']}")
    if rows:
        lines.append(f"  last metrics: {_row(rows[-1])}")
    lines += [f"  {text}" for text in _scores(path, rows)]
    lines.append(f"  checkpoints: {_kept(path, list(checkpoints))}")
    weights = [name for name in (BEST, LAST) if (path / name).exists()]
    if weights:
        lines.append(f"  weights: {', '.join(weights)}")
    bad = _unreadable(path)
    if bad:
        lines.append(f"  {bad}")
    if status.get("state") != "done":
        lines += [f"  log: {line}" for line in _tail(path / LOG)]
        go_on = status.get("next") or command.get("go_on")
        if go_on and not is_held(path) and status.get("state") != "diverged":  # it would only diverge again
            lines.append(f"  {'resume' if checkpoints else 'start again'} with: {go_on}")
    if (path / "report.html").exists():
        lines.append(f"  report: {path / 'report.html'}")
    return "\n".join(lines)


def _sweep(path: Path, command: dict[str, Any]) -> str:
    """A sweep whose last run has not started."""
    found = read_json(path / SWEEP)
    lines = [f"{path}: a sweep, {len(found['tried'])} of {found['points']} points tried"]
    lines += [f"  {','.join(row['settings'])}: {_point(row)}" for row in found["tried"]]
    busy = [place.parent for place in (path / POINTS).rglob(LOCK) if is_held(place.parent)]
    lines += [f"  now: {describe_run(place)}" for place in busy]
    if not busy and command.get("go_on"):
        lines.append(f"  resume with: {command['go_on']}")
    return "\n".join(lines)


def _point(row: dict[str, Any]) -> str:
    """The score of a point of a sweep; its key names the split and the number: "dev accuracy"."""
    key, score = next((name, value) for name, value in row.items() if name != "settings")
    split, _, title = key.partition(" ")
    if isinstance(score, str):  # it diverged, or in the words of earlier versions exploded
        return "diverged"
    criterion = next((one for one in known_measures().values() if title_of(one) == title), Criterion(name=title))
    text = write_value(criterion, score)
    return f"{text} of {split}" if criterion.name == ACCURACY else f"{split} {title} {text}"


def _ending(path: Path, status: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The state and the step."""
    state, held = status.get("state"), is_held(path)
    who = status or read_holder(path)
    process = f"process {who.get('pid', '?')} on {who.get('host', '?')}"
    reached = _reached(status, rows)
    match state:
        case "done":
            return f"done, {reached}, at {status.get('updated', '?')}"
        case "interrupted":
            return f"interrupted by a signal, {reached}, at {status.get('updated', '?')}"
        case "diverged":
            return (
                f"diverged: loss, gradient or weights were no longer finite, {reached}, at {status.get('updated', '?')}"
            )
        case "failed":
            return f"failed with an error, {reached}, at {status.get('updated', '?')}"
        case "preparing" | "running" | None if held:
            what = {"running": "running", "preparing": "being prepared"}.get(state or "", "in use")
            return f"{what}, {reached}, by {process}"
        case "preparing":
            return f"was killed while it was being prepared, {reached}; {process} is gone"
        case "running":
            return f"was killed (by a signal that nothing can catch, or with its machine), {reached}; {process} is gone"
        case _:
            return f"no longer in use, {reached}; {STATUS} cannot be read, as after a power cut"


def _reached(status: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The furthest step that any file in the folder mentions."""
    known = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    step = max([int(status.get("step") or 0), *known])
    steps = status.get("steps")
    if not step:
        return "before its first step" if status.get("state") != "done" else "0 steps"
    return f"step {step:,} of {steps:,}" if isinstance(steps, int) else f"step {step:,}"


def _row(row: dict[str, Any]) -> str:
    numbers = [
        f"{name} {value:.4g}" if isinstance(value, float) and math.isfinite(value) else f"{name} {value}"
        for name, value in row.items()
        if name not in ("step", "kind", "score") and not isinstance(value, dict | list)
    ]
    return f"step {row.get('step', '?')}: {', '.join(numbers[:SHOWN])}"


def _scores(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    """The scores of the weights that the run stands for: the best ones if it selected some, else the last."""
    watched, tested = scores(rows, "watch"), scores(rows, "test")
    chooses = (path / BEST).exists() and all(is_comparable(row) for row in watched)
    if chooses and watched:
        watched = [best_of(watched)]
    shown = {row.get("split"): row for row in (*watched[-1:], *tested[-1:])}
    best = {row.get("step") for row in watched} if chooses else set[Any]()
    return [
        f"{row.get('split', 'score')}: {_score(row)} with the weights of step "
        f"{row.get('step', '?')}{', the best' if row.get('step') in best else ''}"
        for row in shown.values()
    ]


def _score(row: Row) -> str:
    first, count = headline(row), row.get("count", "?")
    assert first is not None
    if first.is_accuracy:
        return f"{first.text} of {count}"
    return f"{first.name} {first.text} ({count:,} images)" if isinstance(count, int) else f"{first.name} {first.text}"


def _kept(path: Path, steps: list[int]) -> str:
    text = f"the newest is of step {steps[0]:,} ({len(steps)} in all)" if steps else "none yet"
    cut_off = list_unfinished(path / FOLDER)
    if cut_off and not is_held(path):
        text += f"; the save of step {cut_off[-1]:,} was cut off, which does no harm"
    return text


def _unreadable(path: Path) -> str:
    if not (path / UNREADABLE).exists():
        return ""
    try:
        count = len(read_log(path / UNREADABLE))
    except (DataError, OSError) as error:
        return f"unreadable images: {error}"
    return f"unreadable images: {count}, listed in {UNREADABLE}" if count else ""


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()[-NOTES:]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
