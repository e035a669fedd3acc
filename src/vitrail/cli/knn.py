"""What `vitrail knn` does."""

import argparse
from typing import Final

from vitrail.cli import frozen
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError
from vitrail.evaluation.knn import classify, nearest
from vitrail.evaluation.labelled import tally
from vitrail.evaluation.result import Measure, share, shown, spanned

NEIGHBOURS: Final = (1, 5, 10, 20, 50)


def run(args: argparse.Namespace) -> int:
    if not args.temperature > 0:
        raise ConfigError(f"--temperature {args.temperature:g} must be above 0")
    if args.neighbours and min(args.neighbours) < 1:
        raise ConfigError(f"-k {min(args.neighbours)} must be at least 1")
    (task,) = frozen.tasks(args)
    with frozen.ready(args) as about:
        part = frozen.frozen(args, about, task)
        frozen.introduce(args, about, task, part)
        numbers = list(dict.fromkeys(args.neighbours or [k for k in NEIGHBOURS if k <= len(part.train)]))
        if max(numbers) > len(part.train):
            raise ConfigError(f"-k {max(numbers)}: there are {len(part.train):,} pictures to be neighbours")
        near = nearest(part.train, part.test, max(numbers), device=about.device)
    rows, measures = list[list[str]](), list[Measure]()
    for k in numbers:
        row = [f"{k}"]
        for name, temperature in ((f"{k}-nn", args.temperature), (f"{k}-nn plain", None)):
            said = classify(near, part.train_labels, len(task.classes), k, temperature)
            right, count = tally(said, part.test_labels)
            measures.append(share(name, right, count))
            row += [shown(measures[-1]), spanned(measures[-1])]
        rows.append(row)
    print_table(["k", "weighted", "95% interval", "plain", "95% interval"], rows, left=0)
    config = {"k": numbers, "temperature": args.temperature, "similarity": "cosine"}
    done = frozen.result("knn", args, about, task, part, measures, config=config, details={})
    frozen.finish(args, [done], part.notes)
    return 0
