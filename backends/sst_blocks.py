"""Decoder of the data blocks of RocksDB table files, many entries per NumPy call.

Two decoders: blocks whose entries all have the same size and header become strided views;
all others are walked in steps, one entry of every restart interval at a time, which is 16
steps whatever the number of entries. Input has passed its checksum, but no length in it is
trusted. Nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.backends.sst_columns import Columns
from keygroups.backends.sst_format import (
    BLOCK_TRAILER_BYTES,
    KEY_TRAILER,
    KEY_TRAILER_BYTES,
    RESTART_BYTES,
    VARINT32_BYTES,
    decode_varint,
)
from keygroups.errors import IncompatibleSnapshot, SnapshotCorrupted

# RocksDB's default is 16. The number of steps is the longest interval, so a forged block of
# many tiny entries in one interval would cost hours without a limit.
MAX_RESTART_INTERVAL = 4096

_Int64s = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

_TRAILER = int.from_bytes(KEY_TRAILER, "little")


def decode_varints(data: _Bytes, at: _Int64s, max_bytes: int) -> tuple[_Int64s, _Int64s]:
    """Decode a varint at each position; returns them and the positions behind them.

    Positions outside ``data`` read its nearest byte: the caller compares with its limits
    afterwards. At most nine bytes, so that 63 bits suffice.

    Raises:
        SnapshotCorrupted: If one is longer than ``max_bytes``.
    """
    first = data.take(at, mode="clip")
    numbers = first.astype(np.int64)
    if first.size == 0 or first.max() < 0x80:
        return numbers, at + 1
    numbers &= 0x7F
    behind = at + 1
    more = np.flatnonzero(first >= 0x80)
    for i in range(1, max_bytes):
        byte = data.take(behind[more], mode="clip")
        numbers[more] |= (byte & 0x7F).astype(np.int64) << (7 * i)
        behind[more] += 1
        more = more[byte >= 0x80]
        if more.size == 0:
            return numbers, behind
    raise SnapshotCorrupted(f"SST varint is longer than {max_bytes} bytes")


def decode_blocks(
    data: _Bytes, base: int, offsets: _Int64s, sizes: _Int64s, columns: Columns
) -> None:
    """Append the entries of adjacent, verified blocks to ``columns``.

    Args:
        data: The blocks with their trailers.
        base: Offset of ``data`` in the file, for messages.
        offsets: Start of every block in ``data``.
        sizes: Size of every block without its trailer.
        columns: Where the entries go.

    Raises:
        SnapshotCorrupted: If a length contradicts another or a limit.
        IncompatibleSnapshot: If an entry is no plain value at sequence number 0.
    """
    run = _Run(data, base)
    # Blocks of one size in a row are tried together as blocks of equal entries; all that are
    # not go to the general decoder, together with their neighbours of the same kind.
    changes = np.flatnonzero(np.diff(sizes)) + 1
    general = 0
    for start, stop in zip([0, *changes.tolist()], [*changes.tolist(), len(sizes)], strict=True):
        views = run.equal_entries(int(offsets[start]), int(sizes[start]), stop - start)
        if views is None:
            continue
        if general < start:
            run.decode_walking(offsets[general:start], sizes[general:start], columns)
        run.copy_equal_entries(views, columns)
        general = stop
    if general < len(sizes):
        run.decode_walking(offsets[general:], sizes[general:], columns)


@dataclass(frozen=True, slots=True)
class _EqualEntries:
    """Blocks whose entries all have one size and one header."""

    start: int
    block_stride: int
    blocks: int
    per_block: int
    entry_size: int
    key_at: int
    key_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class _Entries:
    """Where the entries of some intervals lie, step by step.

    Attributes:
        intervals: Per step, which intervals have an entry.
        shared, unshared: Per step, the bytes of key taken from the entry before and added.
        key_at: Per step, where the added bytes are.
        value_sizes: Per step.
    """

    intervals: list[_Int64s]
    shared: list[_Int64s]
    unshared: list[_Int64s]
    key_at: list[_Int64s]
    value_sizes: list[_Int64s]


class _Run:
    """Adjacent blocks in memory and how to decode them."""

    def __init__(self, data: _Bytes, base: int) -> None:
        self._data = data
        self._base = base

    def _corrupted(self, offset: int, what: str) -> SnapshotCorrupted:
        return SnapshotCorrupted(f"SST block at offset {self._base + offset}: {what}")

    def _restarts(self, offset: int, size: int) -> tuple[_Int64s, int]:
        """Restart positions of a block and where its entries end, both in ``data``."""
        end = offset + size
        count = int.from_bytes(self._data[end - RESTART_BYTES : end].tobytes(), "little")
        if size < RESTART_BYTES or not 0 < count <= size // RESTART_BYTES - 1:
            raise self._corrupted(offset, f"{size} bytes cannot hold {count} restart points")
        body_end = end - RESTART_BYTES * (count + 1)
        restarts = self._data[body_end : end - RESTART_BYTES].view("<u4").astype(np.int64)
        body = body_end - offset
        if restarts[0] != 0 or restarts[-1] >= body or np.any(restarts[1:] <= restarts[:-1]):
            raise self._corrupted(
                offset, f"its {count} restart points do not ascend from 0 to below {body}"
            )
        return restarts + offset, body_end

    # Equal entries.

    def equal_entries(self, start: int, size: int, blocks: int) -> _EqualEntries | None:
        """Tell whether adjacent blocks of ``size`` consist of entries of one size and header."""
        restarts, body_end = self._restarts(start, size)
        body = body_end - start
        head = self._data[start : start + 3 * VARINT32_BYTES].tobytes()
        try:
            shared, at = decode_varint(head, 0, len(head), VARINT32_BYTES)
            key_size, at = decode_varint(head, at, len(head), VARINT32_BYTES)
            value_width, at = decode_varint(head, at, len(head), VARINT32_BYTES)
        except SnapshotCorrupted as error:
            raise self._corrupted(start, str(error)) from error
        entry_size = at + key_size + value_width
        if shared or key_size < KEY_TRAILER_BYTES or at > 8 or body % entry_size:
            return None
        found = _EqualEntries(
            start=start,
            block_stride=size + BLOCK_TRAILER_BYTES,
            blocks=blocks,
            per_block=body // entry_size,
            entry_size=entry_size,
            key_at=at,
            key_width=key_size - KEY_TRAILER_BYTES,
            value_width=value_width,
        )
        # Equal headers at equal distances prove, from the first entry on, that every entry
        # is where it is assumed to be. Entries have more than eight bytes: one load does.
        headers = self._field(found, 0, "<u8")
        mask = np.uint64((1 << 8 * at) - 1)
        if not bool(np.all(headers & mask == int.from_bytes(head[:at], "little"))):
            return None
        # The restart points are not needed, but only blocks with as many of them align.
        counts = np.ndarray(
            (blocks,), "<u4", self._data, start + size - RESTART_BYTES, (found.block_stride,)
        )
        return found if bool(np.all(counts == len(restarts))) else None

    def _field(self, blocks: _EqualEntries, at: int, dtype: str) -> npt.NDArray[Any]:
        """The bytes at ``at`` of every entry, as an array over blocks and entries."""
        return np.ndarray(
            (blocks.blocks, blocks.per_block),
            dtype,
            self._data,
            blocks.start + at,
            (blocks.block_stride, blocks.entry_size),
        )

    def copy_equal_entries(self, blocks: _EqualEntries, columns: Columns) -> None:
        """Append entries found by :meth:`equal_entries`."""
        rows = blocks.blocks * blocks.per_block
        trailer_at = blocks.key_at + blocks.key_width
        self._check_trailers(self._field(blocks, trailer_at, "<u8"), blocks.start)
        columns.admit(rows)
        for column, at, width in (
            (columns.keys, blocks.key_at, blocks.key_width),
            (columns.values, trailer_at + KEY_TRAILER_BYTES, blocks.value_width),
        ):
            used = column.reserve(rows * width)
            if width:  # NumPy has no assignment for items of no bytes
                target = column.data[used : used + rows * width].view(f"V{width}")
                target.reshape(blocks.blocks, blocks.per_block)[...] = self._field(
                    blocks, at, f"V{width}"
                )
            column.advance_fixed(rows, width)

    def _check_trailers(self, trailers: npt.NDArray[np.uint64], offset: int) -> None:
        if not bool(np.all(trailers == _TRAILER)):
            other = int(trailers[trailers != _TRAILER][0])
            raise IncompatibleSnapshot(
                f"SST block at or behind offset {self._base + offset} has an entry of type "
                f"{other & 0xFF} at sequence number {other >> 8}; only values (1) at 0 are "
                "supported, as SstFileWriter writes them"
            )

    # Any entries.

    def decode_walking(self, offsets: _Int64s, sizes: _Int64s, columns: Columns) -> None:
        """Append the entries of blocks of any kind."""
        starts: list[_Int64s] = []
        stops: list[_Int64s] = []
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            restarts, body_end = self._restarts(offset, size)
            starts.append(restarts)
            stops.append(restarts[1:])
            stops.append(np.array([body_end], np.int64))
        entries = self._walk(np.concatenate(starts), np.concatenate(stops))
        # An entry's row: the rows of the intervals before its own, and its step.
        counts = np.bincount(np.concatenate(entries.intervals))
        first_rows = np.cumsum(counts) - counts
        rows = np.concatenate(
            [first_rows[which] + step for step, which in enumerate(entries.intervals)]
        )
        columns.admit(len(rows))

        def in_order(steps: list[_Int64s]) -> _Int64s:
            column = np.empty(len(rows), np.int64)
            column[rows] = np.concatenate(steps)
            return column

        key_at, unshared = in_order(entries.key_at), in_order(entries.unshared)
        value_at = key_at + unshared
        key_sizes, keys = unshared, self._data
        if any(bool(shared.any()) for shared in entries.shared):
            key_sizes = unshared + in_order(entries.shared)
            columns.keys.reserve(int(key_sizes.sum()) - KEY_TRAILER_BYTES * len(rows))
            keys, key_at = _whole_keys(self._data, entries, first_rows, key_sizes)
        key_sizes = key_sizes - KEY_TRAILER_BYTES
        self._check_trailers(_words_at(keys, key_at + key_sizes), int(offsets[0]))
        columns.keys.append(_pick(keys, key_at, key_sizes))
        columns.values.append(_pick(self._data, value_at, in_order(entries.value_sizes)))

    def _walk(self, at: _Int64s, stops: _Int64s) -> _Entries:
        """Find the entries of all intervals ``[at, stops)``, one step for all at a time."""
        entries = _Entries([], [], [], [], [])
        which = np.arange(len(at), dtype=np.int64)
        key_sizes = np.zeros(len(at), np.int64)
        for _ in range(MAX_RESTART_INTERVAL):
            try:
                shared, here = decode_varints(self._data, at, VARINT32_BYTES)
                unshared, here = decode_varints(self._data, here, VARINT32_BYTES)
                value_sizes, here = decode_varints(self._data, here, VARINT32_BYTES)
            except SnapshotCorrupted as error:
                raise self._corrupted(int(at[0]), f"in the entries behind it: {error}") from error
            ends = here + unshared + value_sizes
            wrong = (ends > stops) | (shared > key_sizes)
            key_sizes = shared + unshared
            wrong |= key_sizes < KEY_TRAILER_BYTES
            if wrong.any():
                raise self._corrupted(
                    int(at[wrong][0]),
                    f"entry there shares {shared[wrong][0]} and adds {unshared[wrong][0]} bytes "
                    f"of key and {value_sizes[wrong][0]} of value, which do not fit before "
                    f"offset {self._base + int(stops[wrong][0])}",
                )
            entries.intervals.append(which)
            entries.shared.append(shared)
            entries.unshared.append(unshared)
            entries.key_at.append(here)
            entries.value_sizes.append(value_sizes)
            left = ends < stops
            if not left.all():
                which, key_sizes = which[left], key_sizes[left]
                ends, stops = ends[left], stops[left]
            if which.size == 0:
                return entries
            at = ends
        raise IncompatibleSnapshot(
            f"SST has more than {MAX_RESTART_INTERVAL} entries between restart points near "
            f"offset {self._base + int(at[0])}"
        )


def _words_at(data: _Bytes, at: _Int64s) -> npt.NDArray[np.uint64]:
    """The little-endian words of eight bytes at any positions."""
    if len(data) < KEY_TRAILER_BYTES:
        return np.empty(0, np.uint64)
    words: npt.NDArray[np.uint64] = np.ndarray((len(data) - 7,), "<u8", data, 0, (1,))
    return words[at]


def _pick(data: _Bytes, at: _Int64s, sizes: _Int64s) -> pa.LargeBinaryArray:
    """The given ascending pieces of ``data``, copied together."""
    # Pieces and the gaps between them are one Arrow column; every second value is a piece.
    rows = len(at)
    offsets = np.empty(2 * rows, np.int64)
    offsets[0::2] = at
    np.add(at, sizes, out=offsets[1::2])
    column = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 2 * rows - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return column.take(pa.array(np.arange(0, 2 * rows, 2, dtype=np.int64)))


def _whole_keys(
    data: _Bytes, entries: _Entries, first_rows: _Int64s, key_sizes: _Int64s
) -> tuple[_Bytes, _Int64s]:
    """Put keys together from what they share with the key before and what they add.

    Returns:
        The keys with their trailers, one behind the other, and where each starts.
    """
    ends = np.cumsum(key_sizes)
    starts = ends - key_sizes
    keys = np.empty(int(ends[-1]), np.uint8)
    steps = zip(entries.intervals, entries.shared, entries.unshared, entries.key_at, strict=True)
    for step, (which, shared, unshared, key_at) in enumerate(steps):
        rows = first_rows[which] + step
        target = starts[rows]
        if step:
            _copy_pieces(keys, target, keys, starts[rows - 1], shared)
        _copy_pieces(keys, target + shared, data, key_at, unshared)
    return keys, starts


def _copy_pieces(
    target: _Bytes, target_at: _Int64s, source: _Bytes, source_at: _Int64s, sizes: _Int64s
) -> None:
    """Copy pieces of any sizes from some positions to others."""
    ends = np.cumsum(sizes)
    count = np.arange(int(ends[-1]), dtype=np.int64)
    begins = ends - sizes
    target[np.repeat(target_at - begins, sizes) + count] = source[
        np.repeat(source_at - begins, sizes) + count
    ]
