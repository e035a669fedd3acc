"""`vitrail fewshot`, `probe` and `knn`: accuracy of frozen features, learned on one split and scored on another."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from vitrail.cli.evaluate.frozen_features import FrozenSplits, FrozenTask, extract_splits, open_tasks, prepare_network
from vitrail.cli.inputs import weights_line
from vitrail.cli.options.evaluate import ALL, FewshotOptions, KnnOptions, ProbeOptions
from vitrail.cli.options.groups import FrozenOptions
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
from vitrail.evaluation.frozen.knn import find_nearest, vote_classes
from vitrail.evaluation.frozen.probe import PENALTIES as PROBE_PENALTIES
from vitrail.evaluation.frozen.probe import TOLERANCE, fit_probe, search_penalty
from vitrail.evaluation.metrics import TOP, count_single_labels, score_predictions
from vitrail.evaluation.result import Measure, Result, format_interval, format_value, measure_share
from vitrail.evaluation.scoring import Subject, describe_scored_data


def show_setup(
    options: FrozenOptions, about: Subject, task: FrozenTask, features: FrozenSplits, *, first: bool = True
) -> None:
    """Prints what is evaluated, before the numbers."""
    if first:
        image = "x".join(map(str, about.preprocessing.image))
        print(weights_line(options.weights, about.facts, f"{image} px", options.precision))
    scored = "held out of it" if task.held is not None else f"of {task.test}"
    how = "from the cache" if features.found else "extracted and cached" if features.kept else "extracted again"
    print(
        f"{task.title}: {len(task.classes):,} classes; learned from {len(features.train):,} of {task.train}, scored on "
        f"{len(features.test):,} {scored}; {features.train.shape[1]:,} features each, {how}"
    )
    for line in features.scope.lines():
        print(line)


def build_result(
    kind: str,
    options: FrozenOptions,
    about: Subject,
    task: FrozenTask,
    features: FrozenSplits,
    measures: Iterable[Measure],
    *,
    config: Mapping[str, Any],
    details: Mapping[str, Any],
) -> Result:
    """The result with its provenance: the scored data, and the data learned from."""
    train, test = task.learnt_from(), features.source
    data = describe_scored_data(about, task.collection, task.test, options.deduplicated_by)
    data |= {"pictures": len(test), "fingerprint": test.fingerprint, "seen": features.scope.facts()}
    if task.held is not None:
        data["split"] = f"{options.held_out:g} of {task.test}"
    if task.elsewhere is not None:
        data |= {"name": task.elsewhere[0], "split": task.elsewhere[1]}
    learnt = {"name": task.title, "split": task.train, "pictures": len(train), "fingerprint": train.fingerprint}
    common = {
        "image": list(about.preprocessing.image),
        "preprocessing": about.preprocessing.to_dict(),
        "view": "reference" if options.reference else "weights' own",
        "precision": options.precision,
        "features": features.train.shape[1],
    }
    return Result(
        kind=kind,
        weights=about.facts,
        data={**data, "train": learnt},
        measures=tuple(measures),
        config={**common, **config},
        details={**details, "unreadable": list(features.unreadable)},
    )


def write_results(options: FrozenOptions, results: Sequence[Result], notes: Iterable[str]) -> None:
    """Prints the notes and writes the files: FILE, or FILE-SET for several data sets."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}")
    out = options.out
    if out is None:
        return
    names = [out] if len(results) == 1 else [out.with_name(f"{out.stem}-{slugify(r)}{out.suffix}") for r in results]
    if len(set(names)) < len(names):  # two folders of one name
        names = [path.with_name(f"{path.stem}-{at}{path.suffix}") for at, path in enumerate(names, 1)]
    for path, one in zip(names, results, strict=True):
        one.write(path)
    print(f"result: {', '.join(map(str, names))}")


def slugify(result: Result) -> str:
    return re.sub(r"[^\w.-]+", "-", str(result.data["name"]))


SHOTS: Final = (1, 5, 10, 25)
SEEDS: Final = (0, 1, 2)


def run_fewshot(options: FewshotOptions) -> int:
    check_fewshot(options)
    tasks = open_tasks(options, options.data, options.test or ())
    shots, notes = feasible_shots(options.shots, tasks)
    with prepare_network(options) as about:
        parts = list[FrozenSplits]()
        for at, task in enumerate(tasks):
            parts.append(extract_splits(options, about, task))
            show_setup(options, about, task, parts[-1], first=at == 0)
        both = list(zip(tasks, parts, strict=True))
        results = (
            score_sweep(options, about, both, shots) if options.sweep else score_draws(options, about, both, shots)
        )
    notes += [note for part in parts for note in part.notes]
    write_results(options, results, notes)
    return 0


def check_fewshot(options: FewshotOptions) -> None:
    """Refuses invalid options before anything is read."""
    if options.sweep and (options.seeds or options.penalty is not None):
        raise ConfigError("--sweep draws nothing and tries every penalty; leave --seeds and --penalty out")
    if options.penalty is not None and not 0 < options.penalty < math.inf:
        raise ConfigError(f"--penalty {options.penalty:g} must be above 0 and finite")
    for option, values, least in (("--shots", options.shots, 1), ("--seeds", options.seeds, 0)):
        if values and min(values) < least:
            raise ConfigError(f"{option} {min(values)} must be at least {least}")


def feasible_shots(asked: Sequence[int] | None, tasks: Sequence[FrozenTask]) -> tuple[list[int], list[str]]:
    """The numbers of shots that every class of every set has images for. A requested one that is impossible is
    an error; a default one is skipped, with a note."""
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
    """The current variant: several draws, one penalty."""
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
        results.append(build_result("fewshot", options, about, task, part, measures, config=config, details=details))
    by_seed = ["std", *(f"seed {seed}" for seed in seeds)] if len(seeds) > 1 else []
    show_table(["shots", "accuracy", "95% interval", *by_seed], rows, len(both))
    return results


def score_sweep(
    options: FewshotOptions, about: Subject, both: Sequence[tuple[FrozenTask, FrozenSplits]], shots: Sequence[int]
) -> list[Result]:
    """The earlier variant: every penalty, and for each number of shots the one with the best mean rank."""
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
        results.append(build_result("fewshot", options, about, task, part, measures, config=config, details=details))
    heads = ["shots", "accuracy", "95% interval", "penalty", *(["at its own best"] if len(both) > 1 else [])]
    show_table(heads, rows, len(both))
    print("The penalty is chosen on the images that are scored, as the reference did; so the numbers flatter a little.")
    return results


def accuracies(part: FrozenSplits, classes: int, number: int, seeds: Sequence[int], penalty: float) -> list[float]:
    """The accuracy of each draw; with all images there is only one."""
    if number == ALL:
        return [fit_ridge(part.train, part.train_labels, classes, penalty).accuracy(part.test, part.test_labels)]
    return score_few_shot(part.train, part.train_labels, part.test, part.test_labels, classes, number, seeds, penalty)


def format_shots(number: int) -> str:
    return "all" if number == ALL else str(number)


def name_measure(number: int) -> str:
    """The name of the metric: 5-shot."""
    return "all shots" if number == ALL else f"{number}-shot"


def count_labelled(part: FrozenSplits) -> int:
    """The number of images with a label."""
    rows = part.test_labels if part.test_labels.ndim == 2 else part.test_labels[:, None]
    return int((rows >= 0).any(1).sum())


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]], sets: int) -> None:
    """Prints a table, with a column for the data set if there are several."""
    if sets > 1:
        print_table(["set", *heads], rows)
    else:
        print_table(heads, [row[1:] for row in rows], left=0)


def run_probe(options: ProbeOptions) -> int:
    if options.penalty is not None and not 0 < options.penalty < math.inf:
        raise ConfigError(f"--penalty {options.penalty:g} must be above 0 and finite")
    if options.iterations < 1:
        raise ConfigError(f"--iterations {options.iterations} must be at least 1")
    (task,) = open_tasks(options, [options.data], [options.test] if options.test else [])
    with prepare_network(options) as about:
        part = extract_splits(options, about, task)
        show_setup(options, about, task, part)
    classes, tried = len(task.classes), dict[float, float]()
    penalty: float | None = options.penalty
    if penalty is None:
        penalty, tried = search_penalty(part.train, part.train_labels, classes)
    made = fit_probe(part.train, part.train_labels, classes, penalty, iterations=options.iterations)
    measures = list[Measure]()
    for guesses in (1, TOP):
        if guesses == 1 or classes > TOP:
            right, count = score_predictions(made.top(part.test, guesses), part.test_labels)
            # Of the network's own head it would be the plain one.
            measures.append(measure_share(f"probe top-{guesses}", right, count))
    print_table(
        ["measure", "accuracy", "95% interval"], [(m.name, format_value(m), format_interval(m)) for m in measures]
    )
    how = f"the best of {len(tried)} on a tenth of {task.train}" if tried else "as given"
    print(
        f"penalty {penalty:g}, {how}; {made.iterations} iterations, loss {made.loss:.4f}, "
        f"largest entry of the gradient {made.gradient:.1e}"
    )
    notes = list(part.notes)
    if not made.converged:
        notes.append(f"it has not converged: that is above {TOLERANCE:g}; give more --iterations or a larger --penalty")
    if tried and penalty in (min(tried), max(tried)):
        notes.append("the best penalty is the last that was tried; a better one may lie beyond: --penalty")
    details = {
        "dev_accuracy": {f"{tried_one:g}": accuracy for tried_one, accuracy in tried.items()},
        "iterations": made.iterations,
        "loss": made.loss,
        "gradient": made.gradient,
        "converged": made.converged,
    }
    config = {"penalty": penalty, "penalties": [] if options.penalty is not None else list(PROBE_PENALTIES)}
    done = build_result("probe", options, about, task, part, measures, config=config, details=details)
    write_results(options, [done], notes)
    return 0


NEIGHBOURS: Final = (1, 5, 10, 20, 50)


def run_knn(options: KnnOptions) -> int:
    if not options.temperature > 0:
        raise ConfigError(f"--temperature {options.temperature:g} must be above 0")
    if options.neighbours and min(options.neighbours) < 1:
        raise ConfigError(f"-k {min(options.neighbours)} must be at least 1")
    (task,) = open_tasks(options, [options.data], [options.test] if options.test else [])
    with prepare_network(options) as about:
        part = extract_splits(options, about, task)
        show_setup(options, about, task, part)
        numbers = list(dict.fromkeys(options.neighbours or [k for k in NEIGHBOURS if k <= len(part.train)]))
        if max(numbers) > len(part.train):
            raise ConfigError(f"-k {max(numbers)}: there are {len(part.train):,} images to be neighbours")
        near = find_nearest(part.train, part.test, max(numbers), device=about.device)
    rows, measures = list[list[str]](), list[Measure]()
    for k in numbers:
        row = [f"{k}"]
        for name, temperature in ((f"{k}-nn", options.temperature), (f"{k}-nn plain", None)):
            said = vote_classes(near, part.train_labels, len(task.classes), k, temperature)
            right, count = score_predictions(said, part.test_labels)
            measures.append(measure_share(name, right, count))
            row += [format_value(measures[-1]), format_interval(measures[-1])]
        rows.append(row)
    print_table(["k", "weighted", "95% interval", "plain", "95% interval"], rows, left=0)
    config = {"k": numbers, "temperature": options.temperature, "similarity": "cosine"}
    done = build_result("knn", options, about, task, part, measures, config=config, details={})
    write_results(options, [done], part.notes)
    return 0
