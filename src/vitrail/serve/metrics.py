"""Counters in Prometheus' text format. Written and read on the event loop only, so no lock is needed."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeAlias

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
STATM: Final = Path("/proc/self/statm")
DESCRIPTORS: Final = Path("/proc/self/fd")
Sample: TypeAlias = tuple[str, Mapping[str, str], float]  # suffix of the name, labels, value


class Histogram:
    """Counts below each bound, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.sum += value

    def samples(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        totals = list(accumulate(self.counts))
        for bound, total in zip((*(f"{bound:g}" for bound in self.bounds), "+Inf"), totals, strict=True):
            yield "_bucket", {**labels, "le": bound}, total
        yield "_sum", labels, self.sum
        yield "_count", labels, totals[-1]


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.batches = Histogram(IMAGES)
        self.model_seconds = Histogram(SECONDS)
        self.images: Counter[str] = Counter()
        self.gone = 0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.seconds.setdefault(route, Histogram(SECONDS)).add(seconds)

    def count_batch(self, kind: str, images: int, seconds: float) -> None:
        self.batches.add(images)
        self.model_seconds.add(seconds)
        self.images[kind] += images

    def to_text(self, gauges: Mapping[str, tuple[str, float]], model: Mapping[str, str]) -> str:
        """All counters, with the given gauges (name to help and value)."""
        requests = [("", {"route": r, "status": str(status)}, n) for (r, status), n in sorted(self.requests.items())]
        times = [sample for route, found in sorted(self.seconds.items()) for sample in found.samples({"route": route})]
        images = [("", {"for": kind}, count) for kind, count in self.images.items()]
        families: list[tuple[str, str, str, Iterable[Sample]]] = [
            ("vitrail_requests_total", "counter", "Requests by route and status.", requests),
            ("vitrail_request_seconds", "histogram", "Time from a request's head to its answer.", times),
            ("vitrail_batch_pictures", "histogram", "Images per call of the model.", self.batches.samples({})),
            ("vitrail_model_seconds", "histogram", "Time of one call of the model.", self.model_seconds.samples({})),
            ("vitrail_pictures_total", "counter", "Images computed by the model.", images),
            ("vitrail_gone_total", "counter", "Requests whose client left before the answer.", [("", {}, self.gone)]),
            ("vitrail_model_info", "gauge", "The model that is served.", [("", model, 1)]),
            *(
                (name, "counter" if name.endswith("_total") else "gauge", summary, [("", {}, value)])
                for name, (summary, value) in {**gauges, **process_gauges()}.items()
            ),
        ]
        lines: list[str] = []
        for name, kind, summary, samples in families:
            lines += [f"# HELP {name} {summary}", f"# TYPE {name} {kind}"]
            for suffix, labels, value in samples:
                escaped = {key: text.translate({92: r"\\", 34: r"\"", 10: r"\n"}) for key, text in labels.items()}
                inside = ",".join(f'{key}="{text}"' for key, text in escaped.items())
                lines.append(f"{name}{suffix}{f'{{{inside}}}' if inside else ''} {value:.15g}")
        return "\n".join(lines) + "\n"


def process_gauges() -> dict[str, tuple[str, float]]:
    """Memory and descriptors of this process, where the system reports them."""
    gauges = dict[str, tuple[str, float]]()
    with suppress(ImportError):  # on Windows
        if STATM.is_file():
            memory = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        else:  # the peak, where the system does not report the current value
            import resource

            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        gauges["process_resident_memory_bytes"] = ("Resident memory.", memory)
    if DESCRIPTORS.is_dir():
        gauges["process_open_fds"] = ("Open descriptors.", len(os.listdir(DESCRIPTORS)))
    return gauges
