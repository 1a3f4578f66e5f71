"""Time several ways of doing one job fairly: one thread, CPU seconds of the process, the ways interleaved.

The wall clock of a shared machine measures its neighbours; CPU seconds of one thread do not. The allocator is told to
keep what is freed, because a fresh page costs the kernel more than most of what is measured here, and which of two jobs
meets the fresh pages is chance. To measure memory it is told to give back every tensor at once, because what it keeps
by itself depends on the sizes freed before.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_THRESHOLDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_ALLOCATORS: dict[str, tuple[str | None, str | None]] = {
    "keeps": (str(1 << 40), str(1 << 40)),
    "gives back": ("65536", "65536"),
    "unset": (None, None),
}

Job = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """CPU seconds of a job over those of the base it ran beside: the median of the rounds, and their range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def steady(allocator: str = "keeps") -> None:
    """Start this script again with one thread and an allocator that keeps what is freed, gives it back, or is unset."""
    wanted = {"OMP_NUM_THREADS": "1", **dict(zip(_THRESHOLDS, _ALLOCATORS[allocator], strict=True))}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        changed = {name: value for name, value in {**os.environ, **wanted}.items() if value is not None}
        os.execve(sys.executable, [sys.executable, *sys.argv], changed)  # noqa: S606 - itself
    torch.set_num_threads(1)


def cpu_seconds(job: Job, *, trimmed: bool = False) -> float:
    """CPU seconds of one run; the garbage of what ran before is collected first, and given back where asked for."""
    gc.collect()
    if trimmed:
        ctypes.CDLL(None).malloc_trim(0)
    start = time.process_time()
    job()
    return time.process_time() - start


def rounds(jobs: Mapping[str, Job], count: int, *, trimmed: bool = False) -> dict[str, list[float]]:
    """CPU seconds of each job in each round, after one run of each that does not count.

    Every round begins with the next job, so that no job always follows the same one. Trimmed: every run begins with
    no freed memory to use again.
    """
    names = list(jobs)
    for job in jobs.values():
        job()
    gc.collect()
    gc.freeze()  # so that collecting between runs looks at what the runs left, not at every library
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for nth in range(count):
        first = nth % len(names)
        for name in [*names[first:], *names[:first]]:
            seconds[name].append(cpu_seconds(jobs[name], trimmed=trimmed))
    return seconds


def ratio(job: list[float], base: list[float]) -> Ratio:
    """Two jobs of the same rounds against each other."""
    ratios = [j / b for j, b in zip(job, base, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def milliseconds(job: list[float], base: list[float]) -> float:
    """CPU milliseconds of `job` above `base`, the median of the rounds."""
    return 1e3 * statistics.median(j - b for j, b in zip(job, base, strict=True))


def peak_bytes(job: Callable[[], object]) -> tuple[int, object]:
    """Resident memory a job peaked at above where it began, and its result."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 - not a file on disk
        file.write("5")
    before = _status("VmRSS")
    result = job()
    return _status("VmHWM") - before, result


def _status(name: str) -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123 - not a file on disk
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
