"""Rows, bytes and balance of ranges, as the documents of several commands have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.cli.output import Document, Table, count, ratio, size

MEASURES = ("rows", "size_bytes")


def sums(sizes: pa.Table, measure: str, ranges: Sequence[KeyGroupRange]) -> list[int]:
    """Rows or bytes of each range, of ``Snapshot.key_group_sizes()``."""
    weights = sizes.column(measure).to_numpy()
    up_to = np.concatenate(([0], np.cumsum(weights)))
    return [int(up_to[r.end + 1] - up_to[r.start]) for r in ranges]


def describe_ranges(sizes: pa.Table, ranges: Sequence[KeyGroupRange]) -> list[Document]:
    """Index, key groups, rows and bytes of each range."""
    columns = [sums(sizes, measure, ranges) for measure in MEASURES]
    return [
        {"index": index, "key_groups": [r.start, r.end], "rows": rows, "size_bytes": size_bytes}
        for index, (r, rows, size_bytes) in enumerate(zip(ranges, *columns, strict=True))
    ]


def describe_balance(ranges: Sequence[Document]) -> Document:
    """Of rows and of bytes: the heaviest range, the mean, and how they compare."""
    return {measure: _balance([described[measure] for described in ranges]) for measure in MEASURES}


def heaviest_to_mean(weights: Sequence[int]) -> float | None:
    """The heaviest weight in units of the mean, 1.0 at best; ``None`` if all are 0."""
    total = sum(weights)
    return round(max(weights) * len(weights) / total, 6) if total else None


def balance_table(title: str, balances: dict[str, Document | None]) -> Table:
    """One line for each balance: the heaviest range against the mean."""
    return Table(
        ("", "heaviest rows", "mean rows", "ratio", "heaviest data", "mean data", "ratio"),
        [(name, *_balance_cells(balance)) for name, balance in balances.items()],
        title=title,
    )


def _balance(weights: list[int]) -> dict[str, Any]:
    heaviest = max(weights)
    return {
        "heaviest_range": weights.index(heaviest),
        "heaviest": heaviest,
        "mean": round(sum(weights) / len(weights), 3),
        "ratio": heaviest_to_mean(weights),
    }


def _balance_cells(balance: Document | None) -> list[str]:
    if balance is None:
        return ["?"] * 6
    rows, data = balance["rows"], balance["size_bytes"]
    return [
        count(rows["heaviest"]),
        count(round(rows["mean"])),
        ratio(rows["ratio"]),
        size(data["heaviest"]),
        size(data["mean"]),
        ratio(data["ratio"]),
    ]
