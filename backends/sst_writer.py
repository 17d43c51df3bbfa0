"""Writer of RocksDB table files from Arrow columns; :mod:`.sst_format` has the layout.

Format version 2, no compression, XXH64 block checksums, a restart point every 16 entries, no
shared key prefixes, a binary-search index, no filter. Version 2 because it is what RocksDB
since 3.10 reads, and what puts whole keys and handles into the index; XXH64 needs RocksDB 5.18.
The same rows give the same bytes: there is no time and no identity in a file.

Two encoders, equal byte for byte: one for columns whose keys all have one width and values
another (strided assignment into a prepared buffer), one for any widths (an Arrow join).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.backends.sst_format import (
    BLOCK_TRAILER_BYTES,
    KEY_TRAILER,
    KEY_TRAILER_BYTES,
    NO_COMPRESSION,
    encode_varint,
)
from keygroups.backends.sst_table import MAX_ENTRY_BYTES, ByteSink, Rows, Table, column_data
from keygroups.errors import InvalidArgument

DEFAULT_BLOCK_SIZE_BYTES = 64 * 1024
MAX_BLOCK_SIZE_BYTES = 1 << 28
RESTART_INTERVAL = 16

# Enough blocks at once to drown the cost of a NumPy call, few enough to stay in the cache.
_FIXED_CHUNK_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 22
_WINDOW_ROWS = 1 << 16

_Int64s = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

_TRAILER_SCALAR = pa.scalar(KEY_TRAILER, pa.large_binary())
_EMPTY_SCALAR = pa.scalar(b"", pa.large_binary())


def write_sst(
    sink: ByteSink,
    keys: pa.LargeBinaryArray,
    values: pa.LargeBinaryArray,
    *,
    block_size_bytes: int = DEFAULT_BLOCK_SIZE_BYTES,
) -> None:
    """Write one table file that RocksDB can ingest.

    Format: RocksDB wiki, "Rocksdb BlockBasedTable Format", version 2. Checked: RocksDB 10.4
    ingests, iterates and looks up; ``sst_dump --command=verify`` of RocksDB 7.8 passes.

    Args:
        sink: Takes the bytes in order, about 1 to 4 MiB per call (more for larger entries).
            Every ``memoryview`` is valid only during the call.
        keys: Strictly increasing bytewise, none empty or null. The caller guarantees the
            order; only the first and last key of every block are compared.
        values: As many as keys, none null; may be empty.
        block_size_bytes: A block ends before the entry that would make it larger; an entry
            larger than that has a block of its own.

    Raises:
        InvalidArgument: If an argument breaks these rules. Bytes may have been written by then.
    """
    if not 1 <= block_size_bytes <= MAX_BLOCK_SIZE_BYTES:
        raise InvalidArgument(
            f"block_size_bytes is {block_size_bytes}, not in 1 to {MAX_BLOCK_SIZE_BYTES}"
        )
    rows = Rows.of(keys, values)
    table = Table(sink, rows)
    key_width, value_width = _width(rows.key_offsets), _width(rows.value_offsets)
    # NumPy has no items of no bytes; empty keys are for the order check to refuse.
    if key_width and value_width is not None:
        _write_fixed(table, rows, key_width, value_width, block_size_bytes)
    else:
        _write_variable(table, rows, block_size_bytes)
    table.finish()


def _width(offsets: _Int64s) -> int | None:
    """The one length of all values, or ``None`` if there are several."""
    rows = len(offsets) - 1
    width, rest = divmod(int(offsets[-1] - offsets[0]), rows)
    if rest:
        return None
    steps = np.arange(min(rows, _WINDOW_ROWS) + 1, dtype=np.int64) * width
    for start in range(0, rows, _WINDOW_ROWS):
        window = offsets[start : start + _WINDOW_ROWS + 1]
        if not np.array_equal(window - window[0], steps[: len(window)]):
            return None
    return width


def _entry_header(key_width: int, value_width: int) -> bytes:
    """Three varints: shared prefix (always 0), key with its trailer, value."""
    return b"\0" + encode_varint(key_width + KEY_TRAILER_BYTES) + encode_varint(value_width)


def _check_entry(size: int) -> None:
    if size > MAX_ENTRY_BYTES:
        raise InvalidArgument(f"an entry has {size} bytes; at most {MAX_ENTRY_BYTES} fit")


def _write_fixed(
    table: Table, rows: Rows, key_width: int, value_width: int, block_size_bytes: int
) -> None:
    """Encode columns in which every key has one width and every value another."""
    _check_entry(key_width + value_width + 32)
    header = _entry_header(key_width, value_width)
    entry_size = len(header) + key_width + KEY_TRAILER_BYTES + value_width
    per_block = min(max(1, block_size_bytes // entry_size), len(rows))
    full_blocks, rest = divmod(len(rows), per_block)
    per_chunk = max(1, min(full_blocks, _FIXED_CHUNK_BYTES // (per_block * entry_size)))
    chunk = _FixedChunk(header, key_width, value_width, per_block, per_chunk)
    row = 0
    for block in range(0, full_blocks, per_chunk):
        blocks = min(per_chunk, full_blocks - block)
        row = chunk.write(table, rows, row, blocks)
    if rest:
        _FixedChunk(header, key_width, value_width, rest, 1).write(table, rows, row, 1)


class _FixedChunk:
    """A reused buffer of blocks in which all but keys, values and checksums is in place."""

    def __init__(
        self, header: bytes, key_width: int, value_width: int, per_block: int, blocks: int
    ) -> None:
        entry_size = len(header) + key_width + KEY_TRAILER_BYTES + value_width
        tail = _restarts(np.arange(per_block, dtype=np.int64) * entry_size)
        body = per_block * entry_size
        self._per_block = per_block
        self._block_size = body + len(tail)
        stride = self._block_size + BLOCK_TRAILER_BYTES
        self._buffer = np.empty(blocks * stride, np.uint8)
        by_block = self._buffer.reshape(blocks, stride)
        by_block[:, body : self._block_size] = np.frombuffer(tail, np.uint8)
        by_block[:, self._block_size] = NO_COMPRESSION

        def field(offset: int, width: int) -> npt.NDArray[np.void]:
            """The same ``width`` bytes of every entry, as one array over blocks and entries."""
            return np.ndarray(
                (blocks, per_block), f"V{width}", self._buffer, offset, (stride, entry_size)
            )

        key_at = len(header)
        value_at = key_at + key_width + KEY_TRAILER_BYTES
        field(0, key_at)[...] = np.void(header)
        field(key_at + key_width, KEY_TRAILER_BYTES)[...] = np.void(KEY_TRAILER)
        self._fields = [(key_width, field(key_at, key_width))]
        if value_width:  # NumPy has no assignment for items of no bytes
            self._fields.append((value_width, field(value_at, value_width)))

    def write(self, table: Table, rows: Rows, row: int, blocks: int) -> int:
        """Fill and write ``blocks`` blocks from ``row`` on; returns the row behind them."""
        count = blocks * self._per_block
        sources = (
            (rows.key_bytes, int(rows.key_offsets[row])),
            (rows.value_bytes, int(rows.value_offsets[row])),
        )
        for (width, field), (data, start) in zip(self._fields, sources, strict=False):
            source = data[start : start + count * width].view(f"V{width}")
            field[:blocks] = source.reshape(blocks, self._per_block)
        row_ends = list(range(row + self._per_block, row + count + 1, self._per_block))
        table.add_blocks(self._buffer, [self._block_size] * blocks, row_ends, row)
        return row + count


def _restarts(entry_starts: _Int64s) -> bytes:
    """The end of a block: offset of every sixteenth entry, then how many those are."""
    restarts = entry_starts[::RESTART_INTERVAL].astype("<u4")
    return restarts.tobytes() + struct.pack("<I", len(restarts))


def _write_variable(table: Table, rows: Rows, block_size_bytes: int) -> None:
    """Encode columns of any widths, one window of whole blocks at a time."""
    buffer = np.empty(0, np.uint8)
    row = 0
    while row < len(rows):
        window = _plan_window(rows, row, block_size_bytes)
        last = int(window.borders[-1])
        body = _join(rows, row, last, window.header_bytes, window.header_ends)
        starts = np.concatenate(([0], window.ends))
        tails: list[bytes] = []
        sizes: list[int] = []
        for first, end in zip(window.borders[:-1] - row, window.borders[1:] - row, strict=True):
            tail = _restarts(starts[first:end] - starts[first])
            tails.append(tail)
            sizes.append(int(starts[end] - starts[first]) + len(tail))
        total = sum(sizes) + BLOCK_TRAILER_BYTES * len(sizes)
        if len(buffer) < total:
            buffer = np.empty(total, np.uint8)
        _spread(buffer, body, sizes, tails)
        table.add_blocks(buffer, sizes, window.borders[1:].tolist(), row)
        row = last


def _spread(buffer: _Bytes, body: _Bytes, sizes: list[int], tails: list[bytes]) -> None:
    """Copy the joined entries to where their blocks lie, each followed by its tail."""
    view = buffer.data
    source = body.data
    taken = at = 0
    for size, tail in zip(sizes, tails, strict=True):
        length = size - len(tail)
        view[at : at + length] = source[taken : taken + length]
        view[at + length : at + size] = tail
        buffer[at + size] = NO_COMPRESSION
        taken += length
        at += size + BLOCK_TRAILER_BYTES


@dataclass(frozen=True, slots=True)
class _Window:
    """Some adjacent rows that fill whole blocks.

    Attributes:
        borders: First row of every block, and the row behind the last block.
        ends: End of every row's entry, counted from the first row of the window.
        header_bytes: The headers of all entries.
        header_ends: End of every row's header in ``header_bytes``.
    """

    borders: _Int64s
    ends: _Int64s
    header_bytes: _Bytes
    header_ends: _Int64s


def _plan_window(rows: Rows, row: int, block_size_bytes: int) -> _Window:
    """Lay out as many whole blocks from ``row`` on as some MiB hold, at least one."""
    budget_bytes, budget_rows = _WINDOW_BYTES, _WINDOW_ROWS
    while True:
        stop = min(len(rows), row + budget_rows)
        for offsets in (rows.key_offsets, rows.value_offsets):
            within = offsets[row + 1 : stop + 1]
            limit = offsets[row] + budget_bytes
            stop = row + max(1, int(np.searchsorted(within, limit, side="right")))
        key_sizes = np.diff(rows.key_offsets[row : stop + 1]) + KEY_TRAILER_BYTES
        value_sizes = np.diff(rows.value_offsets[row : stop + 1])
        key_varints, value_varints = _varint_sizes(key_sizes), _varint_sizes(value_sizes)
        header_sizes = 1 + key_varints + value_varints
        ends = np.cumsum(header_sizes + key_sizes + value_sizes)
        borders = _block_borders(ends, block_size_bytes, is_end=stop == len(rows))
        if len(borders) > 1:
            break
        # Less than one block: look at more rows. Only sizes were computed so far.
        budget_bytes, budget_rows = 2 * budget_bytes, 2 * budget_rows
    count = borders[-1]
    header_ends = np.cumsum(header_sizes[:count])
    headers = np.zeros(header_ends[-1], np.uint8)
    at = header_ends - header_sizes[:count] + 1
    _put_varints(headers, at, key_sizes[:count], key_varints[:count])
    _put_varints(headers, at + key_varints[:count], value_sizes[:count], value_varints[:count])
    return _Window(np.array(borders, np.int64) + row, ends[:count], headers, header_ends)


def _block_borders(ends: _Int64s, block_size_bytes: int, *, is_end: bool) -> list[int]:
    """Cut entries into blocks; the last block counts only if no later entry can join it."""
    borders = [0]
    start = 0
    while borders[-1] < len(ends):
        full = int(np.searchsorted(ends, start + block_size_bytes, side="right"))
        border = max(full, borders[-1] + 1)
        size = int(ends[border - 1]) - start
        if border == borders[-1] + 1:
            _check_entry(size)
        if border == len(ends) and size < block_size_bytes and not is_end:
            break
        borders.append(border)
        start += size
    return borders


def _varint_sizes(numbers: _Int64s) -> _Int64s:
    sizes = np.ones(len(numbers), np.int64)
    largest = int(numbers.max())
    bits = 7
    while largest >> bits:
        sizes += numbers >= 1 << bits
        bits += 7
    return sizes


def _put_varints(out: _Bytes, at: _Int64s, numbers: _Int64s, sizes: _Int64s) -> None:
    """Write varints of the given sizes at the given positions."""
    for i in range(int(sizes.max())):
        if i and int(sizes.min()) <= i:
            longer = sizes > i
            at, numbers, sizes = at[longer], numbers[longer], sizes[longer]
        low = numbers >> (7 * i) & 0x7F
        out[at + i] = low | (sizes > i + 1) * 0x80


def _join(rows: Rows, row: int, end: int, headers: _Bytes, header_ends: _Int64s) -> _Bytes:
    """The entries of rows ``[row, end)``, one behind the other."""
    count = end - row
    header_offsets = np.concatenate((np.zeros(1, np.int64), header_ends))
    header_column = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), count, [None, pa.py_buffer(header_offsets), pa.py_buffer(headers)]
    )
    entries = pc.binary_join_element_wise(
        header_column,
        rows.keys.slice(row, count),
        _TRAILER_SCALAR,
        rows.values.slice(row, count),
        _EMPTY_SCALAR,
    )
    return column_data(entries)
