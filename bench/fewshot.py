"""The closed-form classifier compared with scikit-learn's Ridge: the ratio of medians in one run.

    python bench/fewshot.py                      # 10,000 x 768 features to 1,000 classes
    python bench/fewshot.py --samples 1000 --features 768 --classes 37

Both solve the same system in float64 by Cholesky decomposition, alternating round by round, so that other load on the
machine affects both. vitrail starts from the float32 features and labels: its time includes whitening, the constant and
the targets. scikit-learn gets the whitened float64 features, the constant and the targets ready made, and only `fit` is
timed. The weights of both are compared with those of scipy.linalg.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vitrail.evaluation.frozen.fewshot import PENALTY, decompose, fit_ridge


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    made = work()
    return time.perf_counter() - begun, made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import scipy.linalg
    import sklearn
    from sklearn.linear_model import Ridge

    rng = np.random.default_rng(0)
    scale, offset = rng.uniform(0.1, 3.0, args.features), rng.normal(size=args.features)
    features = (rng.normal(size=(args.samples, args.features)) * scale + offset).astype(np.float32)
    labels = rng.permutation(np.arange(args.samples) % args.classes)
    x = features.astype(np.float64)
    x = np.concatenate([(x - x.mean(0)) / (x.std(0) + 1e-5), np.full((args.samples, 1), 100.0)], 1)
    y = 2.0 * np.eye(args.classes)[labels] - 1.0
    exact = scipy.linalg.solve(x.T @ x + PENALTY * np.eye(x.shape[1]), x.T @ y, assume_a="pos")
    given, numbers = torch.from_numpy(features), torch.from_numpy(labels)

    seconds: dict[str, list[float]] = {"vitrail": [], "scikit-learn": [], "vitrail, 30 penalties": []}
    ours: Any = None
    theirs: Any = None
    for number in range(args.rounds + 1):
        rounds = {
            "vitrail": timed(lambda: fit_ridge(given, numbers, args.classes)),
            "scikit-learn": timed(lambda: Ridge(alpha=PENALTY, fit_intercept=False, solver="cholesky").fit(x, y)),
            "vitrail, 30 penalties": timed(lambda: decompose(given, numbers, args.classes)),
        }
        ours, theirs = rounds["vitrail"][1], rounds["scikit-learn"][1]
        if number:  # the first one warms up
            for name, (taken, _) in rounds.items():
                seconds[name].append(taken)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    ratios = [ours_s / theirs_s for ours_s, theirs_s in zip(seconds["vitrail"], seconds["scikit-learn"], strict=True)]
    off = {
        "vitrail": float(np.abs(ours.weight.numpy() - exact).max()),
        "scikit-learn": float(np.abs(theirs.coef_.T - exact).max()),
    }
    found = {
        "shape": [args.samples, args.features, args.classes],
        "seconds": median,
        "ratio": median["vitrail"] / median["scikit-learn"],
        "ratio by round": ratios,
        "largest difference from scipy.linalg": off,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, scikit-learn {sklearn.__version__}",
    }
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{args.samples:,} x {args.features} features, {args.classes:,} classes; {found['machine']}")
    for name, value in median.items():
        what = " (the decomposition)" if "30" in name else ""
        print(f"  {name:<22} {1e3 * value:8.1f} ms{what}")
    print(f"  vitrail / scikit-learn {found['ratio']:8.2f}    (by round {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"  off scipy.linalg's by  {off['vitrail']:8.1e}    (scikit-learn {off['scikit-learn']:.1e})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
