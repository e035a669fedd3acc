"""What `vitrail probe` does."""

import math

from vitrail.cli import frozen
from vitrail.cli.options.probe import ProbeOptions
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.evaluation.frozen.probe import PENALTIES, TOLERANCE, fit_probe, search_penalty
from vitrail.evaluation.metrics import TOP, score_predictions
from vitrail.evaluation.result import Measure, format_interval, format_value, measure_share


def run_probe(options: ProbeOptions) -> int:
    if options.penalty is not None and not 0 < options.penalty < math.inf:
        raise ConfigError(f"--penalty {options.penalty:g} must be above 0 and finite")
    if options.iterations < 1:
        raise ConfigError(f"--iterations {options.iterations} must be at least 1")
    (task,) = frozen.open_tasks(options, [options.data], [options.test] if options.test else [])
    with frozen.prepare_network(options) as about:
        part = frozen.extract_splits(options, about, task)
        frozen.show_setup(options, about, task, part)
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
    config = {"penalty": penalty, "penalties": [] if options.penalty is not None else list(PENALTIES)}
    done = frozen.build_result("probe", options, about, task, part, measures, config=config, details=details)
    frozen.write_results(options, [done], notes)
    return 0
