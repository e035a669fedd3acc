"""Linear probe: multinomial logistic regression on frozen features, by L-BFGS until the gradient vanishes.

The penalty is chosen on a tenth of train, held out of every class alike, and the probe is then made from all of it; or
it is given. Features are extracted once and kept for later, for `vitrail fewshot` and `vitrail knn`, too."""

import argparse
from dataclasses import dataclass

from vitrail.cli.options.groups import FrozenOptions, add_frozen
from vitrail.evaluation.defaults import ITERATIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions(FrozenOptions):
    """The options of `vitrail probe`."""

    data: str
    test: str | None = None
    penalty: float | None = None
    iterations: int = ITERATIONS


OPTIONS = ProbeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_frozen(parser)
    parser.add_argument(
        "--penalty",
        type=float,
        metavar="L2",
        help="of the weights, next to the mean loss (default: the best of 10 to 1e-6)",
    )
    parser.add_argument(
        "--iterations", type=int, default=ITERATIONS, metavar="N", help=f"of L-BFGS at most (default: {ITERATIONS})"
    )
