"""Measuring: a subject against a baseline, alternating, as medians."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """A subject and what it is compared with.

    Attributes:
        name: What is measured.
        subject: Does it once.
        against: What the baseline is.
        baseline: Does that once.
        rows: How many rows the subject treats.
        baseline_rows: How many the baseline treats; as many if 0.
    """

    name: str
    subject: Callable[[], object]
    against: str
    baseline: Callable[[], object]
    rows: int
    baseline_rows: int = 0


@dataclass(frozen=True)
class Figure:
    """Medians of one comparison.

    Attributes:
        cpu_s: CPU seconds of the subject, of the whole process.
        wall_s: Wall seconds of the subject.
        cpu_ratio: How many times less CPU a row the subject needs than the baseline.
        wall_ratio: The same of wall time.
        spread: Largest over smallest wall time of the subject.
    """

    group: str
    name: str
    against: str
    rows: int
    cpu_s: float
    wall_s: float
    cpu_ratio: float
    wall_ratio: float
    spread: float

    def to_json(self) -> dict[str, object]:
        """Returns the figure as JSON, rounded to what it is worth."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in vars(self).items()
        }

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        rate = self.rows / self.cpu_s / 1e6 if self.rows else 0.0
        return [
            self.group,
            self.name,
            self.against,
            f"{rate:.1f}" if rate else "",
            f"{self.wall_s:.3f}",
            f"{self.cpu_ratio:.2f}",
            f"{self.wall_ratio:.2f}",
            f"{self.spread:.2f}",
        ]


def measure(group: str, comparison: Comparison, repeat: int) -> Figure:
    """Runs subject and baseline in turn, after one run of each that does not count."""
    subject, baseline = [], []
    timed(comparison.subject)
    timed(comparison.baseline)
    for _ in range(repeat):
        subject.append(timed(comparison.subject))
        baseline.append(timed(comparison.baseline))
    scale = (comparison.rows or 1) / (comparison.baseline_rows or comparison.rows or 1)
    wall, cpu = (statistics.median(run[i] for run in subject) for i in (0, 1))
    base_wall, base_cpu = (statistics.median(run[i] for run in baseline) * scale for i in (0, 1))
    walls = [run[0] for run in subject]
    return Figure(
        group=group,
        name=comparison.name,
        against=comparison.against,
        rows=comparison.rows,
        cpu_s=cpu,
        wall_s=wall,
        cpu_ratio=base_cpu / cpu if cpu else 0.0,
        wall_ratio=base_wall / wall,
        spread=max(walls) / min(walls),
    )


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Returns wall and CPU seconds of one run, without the garbage collector in between."""
    gc.collect()
    gc.disable()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
