"""`vitrail serve` under load: correctness, memory, latency, and the benefit of batching.

    python bench/serve.py                     # everything, about five minutes
    python bench/serve.py --only load ratio   # some of the parts
    python bench/serve.py --seconds 10        # shorter

A ViT of the size of the bundled model (ViT-Mini/4: 32 px, 64 patches, width 256, depth 7) is served on loopback.
Clients in another process send their next request as soon as the last one is answered. Every answer is compared with
that of the offline predictor.

    load     32 clients for --seconds: errors, latency, memory and descriptors before and after
    ratio    32 clients, alternating with a server that handles one image at a time (--batch 1), in rounds
    flood    200 clients at a queue of 32 places: how fast 429 is returned, and how fast /health responds meanwhile
    steps    1, 8, 32 and 128 clients, 1,000 requests each
    soak     32 clients, one request in ten is bad: no 5xx, and memory growth per 1,000 requests

Other load on the machine distorts times and their ratio; the processor time per image is therefore printed as well.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serve.load import Load, Stock, load, plan, stocked
from tests.serve.subprocess_server import Running, running
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config

PARTS = ("load", "ratio", "flood", "steps", "soak")


def told(name: str, report: dict[str, Any]) -> str:
    times = report["times"].get("200", {})
    cpu = report["server_cpu"] / max(report["rate"], 1e-9)
    p50, p99, most = (1e3 * times.get(key, 0) for key in ("p50", "p99", "max"))
    return (
        f"  {name:<26} {report['rate']:7.1f} /s   p50 {p50:6.0f}  p99 {p99:6.0f}  max {most:6.0f} ms"
        f"   {1e3 * cpu:5.1f} ms cpu   {report['statuses']}"
        f"   off by {report['difference']:.0e}   clients {report['client_cpu']:.2f} cores"
    )


def under_load(server: Running, folder: Path, stock: Stock, seconds: float) -> dict[str, Any]:
    load(server, folder, plan(stock.good, clients=32, seconds=min(10.0, seconds)))  # warms up
    memory, descriptors = server.memory, server.descriptors
    report = load(server, folder, plan(stock.good, clients=32, seconds=seconds))
    time.sleep(1)
    report["memory"] = [memory, server.memory]
    report["descriptors"] = [descriptors, server.descriptors]
    print(told(f"32 clients, {seconds:g} s", report))
    print(
        f"    memory {memory >> 20} -> {server.memory >> 20} MiB ({100 * (server.memory / memory - 1):+.1f} %), "
        f"descriptors {descriptors} -> {server.descriptors}"
    )
    return report


def ratio(server: Running, single: Running, folder: Path, stock: Stock, seconds: float, rounds: int) -> dict[str, Any]:
    load(single, folder, plan(stock.good, clients=32, seconds=3))
    rates: dict[str, list[float]] = {"batches": [], "one at a time": []}
    costs: dict[str, list[float]] = {"batches": [], "one at a time": []}
    for _ in range(rounds):
        for name, asked in (("one at a time", single), ("batches", server)):
            report = load(asked, folder, plan(stock.good, clients=32, seconds=seconds))
            assert set(report["statuses"]) == {"200"}, report["statuses"]
            rates[name].append(report["rate"])
            costs[name].append(report["server_cpu"] / max(report["rate"], 1e-9))
    each = [many / one for many, one in zip(rates["batches"], rates["one at a time"], strict=True)]
    value = statistics.median(each)  # what else the machine does falls on both of a round
    cost = statistics.median(costs["one at a time"]) / statistics.median(costs["batches"])
    for name, some in rates.items():
        cpu = 1e3 * statistics.median(costs[name])
        print(f"  {name:<26} {statistics.median(some):7.1f} /s (median of {rounds} rounds)   {cpu:5.1f} ms cpu")
    low, high = statistics.quantiles(each, n=4)[::2] if len(each) > 1 else (value, value)
    print(f"    throughput {value:.2f} times (half of the rounds {low:.2f} to {high:.2f}), {cost:.2f} times by cpu")
    return {"ratio": value, "by round": each, "by cpu": cost, "rates": rates}


def flood(server: Running, folder: Path, stock: Stock, seconds: float) -> dict[str, Any]:
    crowd = Load(server, folder, plan(stock.good, clients=200, seconds=seconds, patience=0.1))
    time.sleep(1.5)
    health = load(server, folder, plan([(str(folder / "health"), None)], clients=1, seconds=seconds - 2, pause=0.05))
    report = crowd.done()
    report["health"] = health["times"]["200"]
    refused = report["times"].get("429", {})
    print(told("200 clients, queue of 32", report))
    for name, times in (("429", refused), ("/health", report["health"])):
        shown = ", ".join(f"{key} {1e3 * times.get(key, 0):.0f}" for key in ("p50", "p99", "max"))
        print(f"    {name}: {times.get('count', 0):,}, {shown} ms")
    return report


def steps(server: Running, folder: Path, stock: Stock, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for clients in (1, 8, 32, 128):
        report = found[str(clients)] = load(server, folder, plan(stock.good, clients=clients, count=count))
        print(told(f"{clients} clients x {count:,}", report))
    return found


def soak(server: Running, folder: Path, stock: Stock, count: int) -> dict[str, Any]:
    mixed = list[tuple[str, Any]]()
    for at, good in enumerate(stock.good):
        mixed += [good, stock.bad[at // 9 % len(stock.bad)]] if at % 9 == 8 else [good]
    load(server, folder, plan(mixed, clients=32, count=500))
    memory = server.memory
    report = load(server, folder, plan(mixed, clients=32, count=count))
    time.sleep(1)
    growth = (server.memory - memory) / report["sent"] * 1000
    report["growth a 1,000"] = growth
    print(told(f"soak, 10 % bad, {count:,}", report))
    print(f"    memory {memory >> 20} -> {server.memory >> 20} MiB: {growth / 2**20:+.2f} MiB a 1,000 requests")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the main load")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--round-seconds", type=float, default=3.0)
    parser.add_argument("--count", type=int, default=1000, help="requests per step")
    parser.add_argument("--soak", type=int, default=5000, help="requests of the soak test")
    parser.add_argument("--threads", type=int, help="threads of the network (default: that of vitrail serve)")
    parser.add_argument("--model", default="ViT-Mini/4", help="a network for 32 px (default: as bundled)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import torch

    threads = f"{args.threads} threads" if args.threads else "the usual threads"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {threads}, torch {torch.__version__}"
    print(f"{machine}; load average {os.getloadavg()[0]:.1f} before")
    found: dict[str, Any] = {"machine": machine, "load before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = model_config(args.model, classes=10, pool="mean", class_token=False)
        assert isinstance(config, ViTConfig)
        stock = stocked(folder, config)
        words = (
            str(stock.weights),
            "--device",
            "cpu",
            *(() if args.threads is None else ("--threads", str(args.threads))),
        )
        with running(*words) as server:
            if "load" in args.only:
                found["load"] = under_load(server, folder, stock, args.seconds)
            if "ratio" in args.only:
                with running(*words, "--batch", "1") as single:
                    found["ratio"] = ratio(server, single, folder, stock, args.round_seconds, args.rounds)
            if "steps" in args.only:
                found["steps"] = steps(server, folder, stock, args.count)
            if "soak" in args.only:
                found["soak"] = soak(server, folder, stock, args.soak)
        if "flood" in args.only:
            with running(*words, "--queue", "32") as server:
                found["flood"] = flood(server, folder, stock, 10.0)
    print(f"load average {os.getloadavg()[0]:.1f} after")
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
