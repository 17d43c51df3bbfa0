"""Snapshot order: rows by key group, key hash and key bytes, each key once.

:class:`Sorter` takes rows in any order and gives them back in snapshot order, holding no more
than a memory budget: beyond it, rows wait on disk in buckets of adjacent key groups. One
bucket is in memory at a time, so the bound is the budget or the largest of 256 buckets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.errors import InvalidArgument
from keygroups.hashing import hash_keys, key_groups_of_hashes
from keygroups.keys import decode_keys, encode_keys
from keygroups.snapshot.backend import RowSchema
from keygroups.snapshot.storage import system_errors

MEMORY_BUDGET_BYTES = 256 << 20
BUCKET_COUNT = 256
_PIECE_ROWS = 1 << 18


def add_key_groups(
    rows: pa.Table, schema: RowSchema, scheme: str, max_parallelism: int
) -> pa.Table:
    """Returns the stored columns of ``rows``: with key group and key hash in front.

    Raises:
        InvalidArgument: If a key is null.
    """
    keys = _canonical(schema.key_array(rows))
    hashes = hash_keys(keys, scheme)
    groups = pa.array(key_groups_of_hashes(hashes, max_parallelism, scheme))
    values = [rows.column(field.name) for field in schema.value]
    return pa.table([groups, hashes, *schema.key_columns(keys), *values], schema=schema.stored)


def _canonical(keys: pa.Array) -> pa.Array:
    """The same keys with one NaN, as Java knows only one: floats through their key bytes."""
    if pa.types.is_floating(keys.type) or pa.types.is_struct(keys.type):
        return decode_keys(encode_keys([keys]), [keys.type])[0]
    return keys


def sort_rows(rows: pa.Table, schema: RowSchema) -> pa.Table:
    """Returns stored columns in snapshot order.

    Raises:
        InvalidArgument: If a key is there twice; the message names it.
    """
    return rows.take(pa.array(snapshot_order(rows, schema)))


def snapshot_order(rows: pa.Table, schema: RowSchema) -> npt.NDArray[np.int64]:
    """Returns the places of stored rows in snapshot order.

    Raises:
        InvalidArgument: If a key is there twice; the message names it.
    """
    group = rows.column("key_group").to_numpy()
    key_hash = rows.column("key_hash").to_numpy().view(np.uint32) ^ np.uint32(1 << 31)
    order = _radix_order([key_hash & np.uint32(0xFFFF), key_hash >> np.uint32(16), group])
    ranks = (group[order].astype(np.int64) << 32) | key_hash[order]
    tied = np.flatnonzero(ranks[1:] == ranks[:-1])
    if len(tied):
        places = np.union1d(tied, tied + 1)
        order[places] = _order_ties(order[places], ranks[places], rows, schema)
    return order


def _radix_order(
    digits: Sequence[npt.NDArray[np.unsignedinteger]],
) -> npt.NDArray[np.int64]:
    """Sorts rows by 16-bit digits, the least significant one first.

    NumPy's stable sort of 16-bit integers is a radix sort; three of them take 0.6 of the time
    of one ``argsort`` of 64-bit ranks.
    """
    order = np.argsort(digits[0].astype(np.uint16), kind="stable")
    for digit in digits[1:]:
        order = order[np.argsort(digit.astype(np.uint16)[order], kind="stable")]
    return order


def _order_ties(
    order: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.int64],
    rows: pa.Table,
    schema: RowSchema,
) -> npt.NDArray[np.int64]:
    """Orders rows of equal key group and hash by their key bytes, and refuses duplicates."""
    keys = schema.key_array(rows.select([field.name for field in schema.key]).take(pa.array(order)))
    table = pa.table({"rank": ranks, "key": encode_keys([keys])})
    by_key = pc.sort_indices(table, sort_keys=[("rank", "ascending"), ("key", "ascending")])
    table = table.take(by_key)
    first, second = table.slice(0, len(table) - 1), table.slice(1)
    duplicate = pc.and_(
        pc.equal(first.column("rank"), second.column("rank")),
        pc.equal(first.column("key"), second.column("key")),
    )
    if pc.any(duplicate).as_py():
        place = pc.index(duplicate, True).as_py()
        key = keys[by_key[place].as_py()].as_py()
        raise InvalidArgument(
            f"key {key!r:.200} is there more than once; a value state has one row a key: "
            f"aggregate the rows first, or use a key that tells them apart"
        )
    ordered: npt.NDArray[np.int64] = order[by_key.to_numpy()]
    return ordered


class Sorter:
    """Sorts more rows than fit in memory.

    Use as a context manager: leaving it deletes what was spilled.

    Args:
        schema: The columns of the rows.
        max_parallelism: How many key groups there are.
        spill_folder: Where buckets may be spilled; made when needed.
        memory_budget_bytes: How much may be held before it is spilled.
    """

    def __init__(
        self,
        schema: RowSchema,
        max_parallelism: int,
        spill_folder: Path,
        memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
    ) -> None:
        self._schema = schema
        self._groups_per_bucket = -(-max_parallelism // BUCKET_COUNT)
        self._spill_folder = spill_folder
        self._budget_bytes = memory_budget_bytes
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spilled: dict[int, pa.RecordBatchStreamWriter] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_spilled()
        with contextlib.suppress(OSError):  # what is left is found by gc
            for path in self._spill_folder.glob("bucket-*.arrow"):
                path.unlink()
            self._spill_folder.rmdir()

    def add(self, rows: pa.Table) -> None:
        """Takes rows (stored columns, any order)."""
        for start in range(0, rows.num_rows, _PIECE_ROWS):
            piece = rows.slice(start, _PIECE_ROWS)
            self._held.append(piece)
            self._held_bytes += piece.nbytes
            if self._held_bytes > self._budget_bytes:
                self._spill()

    def sorted_tables(self) -> Iterator[pa.Table]:
        """Yields all rows in snapshot order; a key group may go on in the next table.

        Raises:
            InvalidArgument: If a key is there twice.
        """
        if not self._spilled:
            yield from self._sorted(self._held)
            return
        self._spill()
        self._close_spilled()
        for bucket in sorted(self._spilled):
            with system_errors("cannot read spilled rows"), pa.OSFile(self._path(bucket)) as file:
                rows = pa.ipc.open_stream(file).read_all()
            yield from self._sorted([rows])

    def _sorted(self, tables: list[pa.Table]) -> Iterator[pa.Table]:
        if not tables:
            return
        rows = pa.concat_tables(tables).combine_chunks()
        tables.clear()
        order = snapshot_order(rows, self._schema)
        for start in range(0, len(order), _PIECE_ROWS):
            yield rows.take(pa.array(order[start : start + _PIECE_ROWS]))

    def _spill(self) -> None:
        for rows in self._held:
            bucket = rows.column("key_group").to_numpy() // self._groups_per_bucket
            order = np.argsort(bucket, kind="stable")
            present, starts = np.unique(bucket[order], return_index=True)
            by_bucket = rows.combine_chunks().take(pa.array(order))
            ends = [*starts[1:].tolist(), len(order)]
            for number, start, end in zip(present.tolist(), starts.tolist(), ends, strict=True):
                with system_errors("cannot spill rows"):
                    self._writer(number).write_table(by_bucket.slice(start, end - start))
        self._held.clear()
        self._held_bytes = 0

    def _writer(self, bucket: int) -> pa.RecordBatchStreamWriter:
        if bucket not in self._spilled:
            self._spill_folder.mkdir(parents=True, exist_ok=True)
            sink = pa.OSFile(self._path(bucket), "wb")
            self._spilled[bucket] = pa.ipc.new_stream(sink, self._schema.stored)
        return self._spilled[bucket]

    def _path(self, bucket: int) -> str:
        return str(self._spill_folder / f"bucket-{bucket:05d}.arrow")

    def _close_spilled(self) -> None:
        for writer in self._spilled.values():
            with system_errors("cannot spill rows"):
                writer.close()
