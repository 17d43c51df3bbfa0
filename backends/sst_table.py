"""The frame of a RocksDB table file being written: input, order, index, properties.

The encoders in :mod:`.sst_writer` fill the data blocks; :mod:`.sst_format` has the layout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.backends.sst_format import (
    BLOCK_TRAILER_BYTES,
    CHECKSUM_XXH64,
    COMPARATOR,
    KEY_TRAILER,
    KEY_TRAILER_BYTES,
    PROPERTIES_BLOCK,
    BlockHandle,
    block_checksum,
    encode_block,
    encode_footer,
    encode_handle,
    encode_varint,
    seal,
)
from keygroups.errors import InvalidArgument

# A block may hold one entry more than its size allows: offsets in it must stay below 2^32.
MAX_ENTRY_BYTES = (1 << 31) - 1

_Int64s = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


class ByteSink(Protocol):
    """Anything that takes bytes in order."""

    def write(self, data: memoryview, /) -> Any:
        """Take all of ``data``; it is valid only during the call."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Both columns and NumPy views of their buffers; offsets are ``len + 1`` long."""

    keys: pa.LargeBinaryArray
    values: pa.LargeBinaryArray
    key_offsets: _Int64s
    value_offsets: _Int64s
    key_bytes: _Bytes
    value_bytes: _Bytes

    @classmethod
    def of(cls, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray) -> Rows:
        for name, column in (("keys", keys), ("values", values)):
            if not isinstance(column, pa.LargeBinaryArray):
                raise InvalidArgument(f"{name} is {type(column).__name__}, not LargeBinaryArray")
            if column.null_count:
                raise InvalidArgument(f"{name} has {column.null_count} nulls; an SST has none")
        if len(keys) != len(values):
            raise InvalidArgument(f"{len(keys)} keys and {len(values)} values: not one to one")
        if len(keys) == 0:
            raise InvalidArgument("no entries: RocksDB does not ingest an empty SST")
        return cls(
            keys, values, _offsets(keys), _offsets(values), column_data(keys), column_data(values)
        )

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int) -> bytes:
        return self.key_bytes[self.key_offsets[row] : self.key_offsets[row + 1]].tobytes()


def _offsets(column: pa.LargeBinaryArray) -> _Int64s:
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    return offsets[column.offset : column.offset + len(column) + 1]


def column_data(column: pa.LargeBinaryArray) -> _Bytes:
    """The bytes of all values, with those outside a slice; offsets count from their start."""
    buffer = column.buffers()[2]
    return np.frombuffer(b"" if buffer is None else buffer, np.uint8)


class Table:
    """What has been written so far: the index, the offset, and the order of keys."""

    def __init__(self, sink: ByteSink, rows: Rows) -> None:
        self._sink = sink
        self._rows = rows
        self._index: list[tuple[bytes, bytes]] = []
        self._last_key = b""
        self._offset = 0

    def add_blocks(self, chunk: _Bytes, sizes: list[int], row_ends: list[int], row: int) -> None:
        """Seal and write the adjacent blocks in ``chunk``, whose rows start at ``row``.

        A block of ``sizes[i]`` bytes is followed by five bytes for its trailer, of which the
        first already holds the compression type.
        """
        view = chunk.data
        start = 0
        for size, row_end in zip(sizes, row_ends, strict=True):
            self._check_order(row, row_end)
            end = start + size + 1
            checksum = block_checksum(CHECKSUM_XXH64, view[start:end], context=0, offset=0)
            struct.pack_into("<I", view, end, checksum)
            handle = encode_handle(BlockHandle(self._offset + start, size))
            self._index.append((self._last_key + KEY_TRAILER, handle))
            start += size + BLOCK_TRAILER_BYTES
            row = row_end
        self._sink.write(view[:start])
        self._offset += start

    def _check_order(self, row: int, row_end: int) -> None:
        first, last = self._rows.key(row), self._rows.key(row_end - 1)
        if first <= self._last_key:
            # The last key starts as b"", so an empty first key is refused here as well.
            raise InvalidArgument(
                f"key {first!r} of row {row} is not greater than {self._last_key!r} before it; "
                "keys must be non-empty, unique and in bytewise order"
            )
        if row_end - 1 > row and last <= first:
            raise InvalidArgument(
                f"key {last!r} of row {row_end - 1} is not greater than {first!r} of row {row}; "
                "keys must be non-empty, unique and in bytewise order"
            )
        self._last_key = last

    def finish(self) -> None:
        """Write properties, index, metaindex and footer."""
        data_size = self._offset
        if sum(len(key) + len(handle) for key, handle in self._index) > MAX_ENTRY_BYTES:
            raise InvalidArgument(
                f"the index of {len(self._index)} blocks exceeds {MAX_ENTRY_BYTES} bytes: write "
                "larger blocks or several files"
            )
        index = encode_block(self._index)
        properties = _properties(self._rows, data_size, len(self._index), len(index))
        properties_at = self._write_block(encode_block(sorted(properties.items())))
        index_at = self._write_block(index)
        metaindex = encode_block([(PROPERTIES_BLOCK, encode_handle(properties_at))])
        metaindex_at = self._write_block(metaindex)
        self._sink.write(memoryview(encode_footer(metaindex_at, index_at)))

    def _write_block(self, block: bytes) -> BlockHandle:
        handle = BlockHandle(self._offset, len(block))
        sealed = seal(block)
        self._sink.write(memoryview(sealed))
        self._offset += len(sealed)
        return handle


def _properties(rows: Rows, data_size: int, blocks: int, index_size: int) -> dict[bytes, bytes]:
    """The table properties, as RocksDB's ``SstFileWriter`` sets them where they are known."""
    raw_key_size = int(rows.key_offsets[-1] - rows.key_offsets[0]) + KEY_TRAILER_BYTES * len(rows)
    numbers = {
        b"column.family.id": 0x7FFFFFFF,  # "unknown": any column family may ingest the file
        b"data.size": data_size,
        b"deleted.keys": 0,
        b"filter.size": 0,
        b"fixed.key.length": 0,
        b"format.version": 2,
        b"index.key.is.user.key": 0,
        b"index.size": index_size + BLOCK_TRAILER_BYTES,
        b"index.value.is.delta.encoded": 0,
        b"merge.operands": 0,
        b"num.data.blocks": blocks,
        b"num.entries": len(rows),
        b"num.range-deletions": 0,
        b"raw.key.size": raw_key_size,
        b"raw.value.size": int(rows.value_offsets[-1] - rows.value_offsets[0]),
    }
    texts = {
        b"block.based.table.index.type": struct.pack("<I", 0),  # binary search
        b"block.based.table.prefix.filtering": b"0",
        b"block.based.table.whole.key.filtering": b"1",
        b"comparator": COMPARATOR,
        b"compression": b"NoCompression",
        # Ingestion asks for these two; the number may be overwritten in place by RocksDB.
        b"external_sst_file.global_seqno": struct.pack("<Q", 0),
        b"external_sst_file.version": struct.pack("<I", 2),
        b"merge.operator": b"nullptr",
        b"prefix.extractor.name": b"nullptr",
        b"property.collectors": b"[]",
    }
    texts.update((name, encode_varint(number)) for name, number in numbers.items())
    return {b"rocksdb." + name: text for name, text in texts.items()}
