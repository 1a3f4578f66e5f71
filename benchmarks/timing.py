"""Time two ways of doing one job fairly: one thread, CPU seconds of the process, the two interleaved.

The wall clock of a shared machine measures its neighbours; CPU seconds of one thread do not. Freed memory is kept
by the allocator (`steady`), because a fresh page costs the kernel more than most of what is measured here, and
which of two jobs meets the fresh pages is chance.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_STEADY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40), "OMP_NUM_THREADS": "1"}

Job = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """CPU seconds of a job over those of the base it ran beside, the median of the pairs."""

    median: float
    low: float
    high: float
    base_seconds: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def steady() -> None:
    """Start this script again with one thread and an allocator that keeps what it frees."""
    if any(os.environ.get(name) != value for name, value in _STEADY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_STEADY})  # noqa: S606
    torch.set_num_threads(1)


def cpu_seconds(job: Job) -> float:
    gc.collect()
    start = time.process_time()
    job()
    return time.process_time() - start


def ratio(base: Job, job: Job, pairs: int) -> Ratio:
    """`job` against `base`, one after the other, `pairs` times, after one run of each that does not count."""
    base(), job()
    timed = [(cpu_seconds(base), cpu_seconds(job)) for _ in range(pairs)]
    ratios = [j / b for b, j in timed]
    middle = statistics.median
    return Ratio(middle(ratios), min(ratios), max(ratios), middle(b for b, _ in timed), middle(j for _, j in timed))


def difference(base: Job, job: Job, pairs: int) -> float:
    """CPU milliseconds of `job` above `base`, the median of the pairs."""
    base(), job()
    return 1e3 * statistics.median(-cpu_seconds(base) + cpu_seconds(job) for _ in range(pairs))


def peak_bytes(job: Callable[[], object]) -> tuple[int, object]:
    """Resident memory a job peaked at above where it began, and its result."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123
        file.write("5")
    before = _status("VmRSS")
    result = job()
    return _status("VmHWM") - before, result


def _status(name: str) -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
