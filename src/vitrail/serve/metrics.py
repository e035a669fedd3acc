"""What happened so far, in Prometheus' text format. Written and read on the event loop alone, so there is no lock."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PICTURES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
STATM: Final = Path("/proc/self/statm")
DESCRIPTORS: Final = Path("/proc/self/fd")


class Histogram:
    """Counts below each bound, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        at = next((at for at, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[at] += 1
        self.sum += value

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        below = 0
        for bound, count in zip((*(f"{bound:g}" for bound in self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield sample(f"{name}_bucket", {**labels, "le": bound}, below)
        yield sample(f"{name}_sum", labels, self.sum)
        yield sample(f"{name}_count", labels, below)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.batches = Histogram(PICTURES)
        self.model_seconds = Histogram(SECONDS)
        self.pictures: Counter[str] = Counter()
        self.gone = 0

    def answered(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.seconds.setdefault(route, Histogram(SECONDS)).add(seconds)

    def computed(self, kind: str, pictures: int, seconds: float) -> None:
        self.batches.add(pictures)
        self.model_seconds.add(seconds)
        self.pictures[kind] += pictures

    def text(self, gauges: Mapping[str, tuple[str, float]], model: Mapping[str, str]) -> str:
        """Everything, with the gauges (name to help and value) that others know."""
        lines = head("vitrail_requests_total", "counter", "Requests by route and status.")
        lines += [
            sample("vitrail_requests_total", {"route": route, "status": str(status)}, count)
            for (route, status), count in sorted(self.requests.items())
        ]
        lines += head("vitrail_request_seconds", "histogram", "Time from a request's head to its answer.")
        for route, seconds in sorted(self.seconds.items()):
            lines += seconds.lines("vitrail_request_seconds", {"route": route})
        lines += head("vitrail_batch_pictures", "histogram", "Images in one call of the network.")
        lines += self.batches.lines("vitrail_batch_pictures", {})
        lines += head("vitrail_model_seconds", "histogram", "Time of one call of the network.")
        lines += self.model_seconds.lines("vitrail_model_seconds", {})
        lines += head("vitrail_pictures_total", "counter", "Images that the network has seen.")
        lines += [sample("vitrail_pictures_total", {"for": kind}, count) for kind, count in self.pictures.items()]
        lines += head("vitrail_gone_total", "counter", "Requests whose client left before the answer.")
        lines.append(sample("vitrail_gone_total", {}, self.gone))
        lines += head("vitrail_model_info", "gauge", "What is served.")
        lines.append(sample("vitrail_model_info", model, 1))
        for name, (help_, value) in {**gauges, **process()}.items():
            lines += [*head(name, "counter" if name.endswith("_total") else "gauge", help_), sample(name, {}, value)]
        return "\n".join(lines) + "\n"


def process() -> dict[str, tuple[str, float]]:
    """Memory and descriptors of this process, where the system tells."""
    held, found = resident(), dict[str, tuple[str, float]]()
    if held is not None:
        found["process_resident_memory_bytes"] = ("Resident memory.", float(held))
    if DESCRIPTORS.is_dir():
        found["process_open_fds"] = ("Open descriptors.", float(len(os.listdir(DESCRIPTORS))))
    return found


def resident() -> int | None:
    """Bytes in memory now; where the system does not say, the most there ever were; on Windows nothing."""
    if STATM.is_file():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def head(name: str, kind: str, help_: str) -> list[str]:
    return [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value:.15g}" if inside else f"{name} {value:.15g}"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
