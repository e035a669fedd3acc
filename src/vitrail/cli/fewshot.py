"""What `vitrail fewshot` does."""

import math
import statistics
from collections.abc import Sequence
from typing import Final

from vitrail.cli import frozen
from vitrail.cli.frozen import FrozenSplits, FrozenTask
from vitrail.cli.options.fewshot import ALL, FewshotOptions
from vitrail.core.console import print_table
from vitrail.core.errors import BadLabels, ConfigError
from vitrail.evaluation.frozen.fewshot import (
    PENALTIES,
    PENALTY,
    choose_penalty,
    estimate_interval,
    fit_ridge,
    score_few_shot,
    sweep_penalties,
)
from vitrail.evaluation.metrics import count_single_labels
from vitrail.evaluation.result import Measure, Result, format_interval, format_value
from vitrail.evaluation.scoring import Subject

SHOTS: Final = (1, 5, 10, 25)
SEEDS: Final = (0, 1, 2)


def run_fewshot(options: FewshotOptions) -> int:
    check_fewshot(options)
    tasks = frozen.open_tasks(options, options.data, options.test or ())
    shots, notes = feasible_shots(options.shots, tasks)
    with frozen.prepare_network(options) as about:
        parts = list[FrozenSplits]()
        for at, task in enumerate(tasks):
            parts.append(frozen.extract_splits(options, about, task))
            frozen.show_setup(options, about, task, parts[-1], first=at == 0)
        both = list(zip(tasks, parts, strict=True))
        results = score_sweep(options, about, both, shots) if options.sweep else score_draws(options, about, both, shots)
    notes += [note for part in parts for note in part.notes]
    frozen.write_results(options, results, notes)
    return 0


def check_fewshot(options: FewshotOptions) -> None:
    """What can be refused before anything is read."""
    if options.sweep and (options.seeds or options.penalty is not None):
        raise ConfigError("--sweep draws nothing and tries every penalty; leave --seeds and --penalty out")
    if options.penalty is not None and not 0 < options.penalty < math.inf:
        raise ConfigError(f"--penalty {options.penalty:g} must be above 0 and finite")
    for option, values, least in (("--shots", options.shots, 1), ("--seeds", options.seeds, 0)):
        if values and min(values) < least:
            raise ConfigError(f"{option} {min(values)} must be at least {least}")


def feasible_shots(asked: Sequence[int] | None, tasks: Sequence[FrozenTask]) -> tuple[list[int], list[str]]:
    """The numbers of shots that every class of every set has images for. One that was asked for and cannot be had is
    refused; of the usual ones it is left out, with a note."""
    shots, notes = list(dict.fromkeys(asked or SHOTS)), list[str]()
    for task in tasks:
        counts = count_single_labels(task.learnt_from().labels, len(task.classes))
        least = int(counts.argmin())
        fewest = int(counts[least])
        few = f"{task.title}: class {task.classes[least]!r} has {fewest} images with one label in {task.train}"
        over = [n for n in shots if fewest < n < ALL]
        fitting = [n for n in shots if n not in over]
        if over and (asked or not fitting):
            remedy = f"ask for --shots {' '.join(map(format_shots, fitting)) or fewest}" if fewest else "give it images"
            raise BadLabels(f"{few}, {over[0]} shots need {over[0]} of every class; {remedy}")
        if over:
            notes.append(f"{few}, too few for {' and '.join(map(str, over))} shots")
        shots = fitting
    return shots, notes


def score_draws(
    options: FewshotOptions, about: Subject, both: Sequence[tuple[FrozenTask, FrozenSplits]], shots: Sequence[int]
) -> list[Result]:
    """The variant of today: several draws, one penalty."""
    seeds, penalty = list(dict.fromkeys(options.seeds or SEEDS)), options.penalty or PENALTY
    rows, results = list[list[str]](), list[Result]()
    for task, part in both:
        count, by_shots, measures = count_labelled(part), dict[str, list[float]](), list[Measure]()
        for number in shots:
            found = accuracies(part, len(task.classes), number, seeds, penalty)
            low, high = estimate_interval(found, count)
            name = name_measure(number)
            by_shots[name] = found
            measures.append(Measure(name=name, value=statistics.fmean(found), low=low, high=high, count=count))
            row = [task.title, format_shots(number), format_value(measures[-1]), format_interval(measures[-1])]
            if len(found) > 1:
                row += [f"{100 * statistics.stdev(found):.2f}", *(f"{100 * accuracy:.2f}" for accuracy in found)]
            elif len(seeds) > 1:  # all shots: nothing is drawn
                row += [""] * (1 + len(seeds))
            rows.append(row)
        config = {"variant": "draws", "shots": list(map(format_shots, shots)), "seeds": seeds, "penalty": penalty}
        details = {"by_seed": by_shots}
        results.append(frozen.build_result("fewshot", options, about, task, part, measures, config=config, details=details))
    by_seed = ["std", *(f"seed {seed}" for seed in seeds)] if len(seeds) > 1 else []
    show_table(["shots", "accuracy", "95% interval", *by_seed], rows, len(both))
    return results


def score_sweep(
    options: FewshotOptions, about: Subject, both: Sequence[tuple[FrozenTask, FrozenSplits]], shots: Sequence[int]
) -> list[Result]:
    """The older variant: every penalty, and for each number of shots the one of the best mean rank over the sets."""
    grids = {
        number: [
            sweep_penalties(p.train, p.train_labels, p.test, p.test_labels, len(task.classes), number)
            for task, p in both
        ]
        for number in shots
    }
    best = {number: choose_penalty(grids[number]) for number in shots}
    rows, results = list[list[str]](), list[Result]()
    for at, (task, part) in enumerate(both):
        count, measures = count_labelled(part), list[Measure]()
        for number in shots:
            value = grids[number][at][best[number]]
            low, high = estimate_interval([value], count)
            measures.append(Measure(name=name_measure(number), value=value, low=low, high=high, count=count))
            rows.append(
                [
                    task.title,
                    format_shots(number),
                    format_value(measures[-1]),
                    format_interval(measures[-1]),
                    f"{best[number]:g}",
                ]
            )
            if len(both) > 1:
                rows[-1].append(f"{max(grids[number][at].values()):.2%}")
        config = {
            "variant": "sweep",
            "shots": list(map(format_shots, shots)),
            "penalties": list(PENALTIES),
            "penalty": {name_measure(number): best[number] for number in shots},
            "ranked_over": [one.title for one, _ in both],
        }
        details = {"by_penalty": {name_measure(n): {f"{p:g}": a for p, a in grids[n][at].items()} for n in shots}}
        results.append(frozen.build_result("fewshot", options, about, task, part, measures, config=config, details=details))
    heads = ["shots", "accuracy", "95% interval", "penalty", *(["at its own best"] if len(both) > 1 else [])]
    show_table(heads, rows, len(both))
    print("The penalty is chosen on the images that are scored, as the reference did; so the numbers flatter a little.")
    return results


def accuracies(part: FrozenSplits, classes: int, number: int, seeds: Sequence[int], penalty: float) -> list[float]:
    """Of each draw; of all images there is only one."""
    if number == ALL:
        return [fit_ridge(part.train, part.train_labels, classes, penalty).accuracy(part.test, part.test_labels)]
    return score_few_shot(part.train, part.train_labels, part.test, part.test_labels, classes, number, seeds, penalty)


def format_shots(number: int) -> str:
    return "all" if number == ALL else str(number)


def name_measure(number: int) -> str:
    """As a measure of a result: 5-shot."""
    return "all shots" if number == ALL else f"{number}-shot"


def count_labelled(part: FrozenSplits) -> int:
    """How many of the images have a label to be scored by."""
    rows = part.test_labels if part.test_labels.ndim == 2 else part.test_labels[:, None]
    return int((rows >= 0).any(1).sum())


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]], sets: int) -> None:
    """With a column for the set where there are several."""
    if sets > 1:
        print_table(["set", *heads], rows)
    else:
        print_table(heads, [row[1:] for row in rows], left=0)
