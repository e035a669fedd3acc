"""What `vitrail knn` does."""

from typing import Final

from vitrail.cli import frozen
from vitrail.cli.options.knn import KnnOptions
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.evaluation.frozen.knn import find_nearest, vote_classes
from vitrail.evaluation.metrics import score_predictions
from vitrail.evaluation.result import Measure, format_interval, format_value, measure_share

NEIGHBOURS: Final = (1, 5, 10, 20, 50)


def run_knn(options: KnnOptions) -> int:
    if not options.temperature > 0:
        raise ConfigError(f"--temperature {options.temperature:g} must be above 0")
    if options.neighbours and min(options.neighbours) < 1:
        raise ConfigError(f"-k {min(options.neighbours)} must be at least 1")
    (task,) = frozen.open_tasks(options, [options.data], [options.test] if options.test else [])
    with frozen.prepare_network(options) as about:
        part = frozen.extract_splits(options, about, task)
        frozen.show_setup(options, about, task, part)
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
    done = frozen.build_result("knn", options, about, task, part, measures, config=config, details={})
    frozen.write_results(options, [done], part.notes)
    return 0
