"""Kills training runs at random moments and during their saves, resumes them, and compares the results bit by bit.

    OMP_NUM_THREADS=1 python -m bench.kill_and_resume --runs 200

Every run is the same 40 steps of a small ViT with dropout, mixing, accumulation, averaging, scoring and a checkpoint
every fourth step. Half of the kills are timed by the clock, half happen at a chosen moment before or after a write, a
sync, a rename or a removal during a save. The last checkpoint of each run (weights, moments, averages) is compared with
that of an undisturbed run.
"""

import argparse
import collections
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import torch

from tests.train.killed import digest_of, start, trial
from tests.train.tiny import tiny_run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run, begun = tiny_run(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        before = time.monotonic()
        os.waitpid(start(run, Path(folder) / "undisturbed"), 0)
        usual = time.monotonic() - before
        wanted = digest_of(Path(folder) / "undisturbed")
        print(f"undisturbed: {usual:.2f} s, {wanted[:16]}", flush=True)
        same, kills, starts = 0, collections.Counter[str](), 0
        for number in range(args.runs):
            out = Path(folder) / f"run-{number}"
            done = trial(run, out, seed=args.seed * 100_000 + number, usual_s=usual)
            same += done.digest == wanted
            kills.update(done.kills)
            starts += done.starts
            shutil.rmtree(out)
            if (number + 1) % 10 == 0:
                print(f"{number + 1} runs, {sum(kills.values())} kills, {same} bit-identical", flush=True)
    result = {
        "runs": args.runs,
        "identical": same,
        "kills": sum(kills.values()),
        "by the clock": kills["clock"],
        "inside a save": sum(kills.values()) - kills["clock"],
        "points hit": len(kills) - ("clock" in kills),
        "starts": starts,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "machine": f"{platform.machine()}, torch {torch.__version__}",
    }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if same == args.runs else 1


if __name__ == "__main__":
    raise SystemExit(main())
