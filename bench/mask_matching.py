"""Matching of queries with segments compared with scipy in the same run: milliseconds, and how many times as fast.

    python bench/mask_matching.py                  # on a GPU if there is one, else on the CPU
    python bench/mask_matching.py --device cpu

For scipy the costs are first copied to the host, as they must be in a training step; its time includes the copy. Every
assignment is compared with scipy's. The costs are random, or such that all targets prefer the same few queries, as at
the start of training.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from vitrail.distributed.process_group import synchronise
from vitrail.tasks.mask_queries.matching import match

# Problems (images times outputs), places for segments, queries.
SIZES = ((64, 8, 50), (80, 16, 100), (80, 32, 200), (80, 64, 200))
ROUNDS = 7


def draw_costs(size: tuple[int, int, int], *, alike: bool) -> Tensor:
    """All segments prefer the same queries where they are `alike`."""
    generator = torch.Generator().manual_seed(0)
    problems, _, queries = size
    own = torch.rand(size, generator=generator)
    return 0.1 * own + torch.rand(problems, 1, queries, generator=generator) if alike else own


def match_by_scipy(costs: Tensor, present: Tensor) -> Tensor:
    found = torch.full(present.shape, -1)
    for at, (cost, there) in enumerate(zip(costs.cpu(), present.cpu(), strict=True)):
        rows, columns = linear_sum_assignment(cost[there].numpy())
        found[at, there.nonzero()[rows, 0]] = torch.from_numpy(columns)
    return found


def measure_ms(work: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(ROUNDS):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def sum_costs(costs: Tensor, found: Tensor) -> Tensor:
    return torch.where(found >= 0, costs.gather(2, found.clamp(min=0)[:, :, None])[:, :, 0], 0.0).double().sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}")
    print(f"{'problems':>8} {'places':>6} {'queries':>7} {'costs':>7} {'ms':>8} {'scipy ms':>8} {'ratio':>6}")
    for size in SIZES:
        for alike in (False, True):
            costs = draw_costs(size, alike=alike).to(device)
            present = (torch.arange(size[1]) < 3 * size[1] // 4).expand(size[:2]).to(device)
            found, expected = match(costs, present), match_by_scipy(costs, present)
            best = sum_costs(costs.cpu(), expected)
            assert torch.allclose(sum_costs(costs.cpu(), found.cpu()), best, rtol=1e-6, atol=0), "not of least cost"
            ours = measure_ms(lambda given=(costs, present): match(*given), device)
            theirs = measure_ms(lambda given=(costs, present): match_by_scipy(*given), device)
            kind = "alike" if alike else "random"
            row = f"{size[0]:>8} {size[1]:>6} {size[2]:>7} {kind:>7}"
            print(f"{row} {ours:>8.3f} {theirs:>8.3f} {theirs / ours:>6.2f}")


if __name__ == "__main__":
    main()
