"""Runs benchmarks and prints each figure as a ratio against a baseline in the same run.

Machines are shared and noisy, so every figure is the median of several runs in which subject
and baseline alternate, and CPU seconds stand beside wall seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import cases
from harness import Figure, measure
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Parses arguments, runs, prints a table and JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/bench/run", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *cases.GROUPS], metavar="name")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, at least 5 to quote")
    parser.add_argument("--save", action="store_true", help=f"write to {RESULTS.name}/")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    figures: list[Figure] = []
    for name in arguments.names or cases.GROUPS:
        for comparison in cases.GROUPS[name](arguments.rows):
            with console.status(f"{name}: {comparison.name}"):
                figures.append(measure(name, comparison, arguments.repeat))
    show(figures)
    document = {
        "machine": machine(),
        "rows": arguments.rows,
        "repeat": arguments.repeat,
        "figures": [figure.to_json() for figure in figures],
    }
    text = json.dumps(document, indent=2)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "latest.json").write_text(text + "\n")
    else:
        sys.stdout.write(text + "\n")
    return 0


def show(figures: list[Figure]) -> None:
    """Prints the table on stderr."""
    table = Table()
    for name in ("group", "what", "against"):
        table.add_column(name)
    for name in ("M rows/CPU s", "wall s", "CPU ratio", "wall ratio", "spread"):
        table.add_column(name, justify="right")
    for figure in figures:
        table.add_row(*figure.cells())
    Console(stderr=True, width=140).print(table)


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    import os

    import numpy as np
    import pyarrow as pa

    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
    return {
        "processor": model,
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
        "system": platform.system(),
    }


if __name__ == "__main__":
    sys.exit(main())
