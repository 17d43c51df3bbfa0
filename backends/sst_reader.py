"""Reader of RocksDB table files into Arrow columns; :mod:`.sst_format` has the layout.

Reads what :mod:`.sst_writer` writes and what RocksDB's ``SstFileWriter`` writes without
compression (format versions 2 to 6): plain values at sequence number 0 in bytewise order under
a binary-search index. Anything else is :class:`~keygroups.errors.IncompatibleSnapshot`.

Every block's checksum is verified before a byte of it is used, and every length in a block is
checked before it is used all the same, since a checksum does not stop a hostile file.
:mod:`.sst_blocks` decodes the data blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.backends.sst_blocks import decode_blocks, decode_varints
from keygroups.backends.sst_columns import Columns, lower_bound
from keygroups.backends.sst_format import (
    BLOCK_TRAILER_BYTES,
    COMPARATOR,
    FOOTER_BYTES,
    INDEX_BLOCK,
    KEY_TRAILER_BYTES,
    MAX_META_BLOCK_BYTES,
    NO_COMPRESSION,
    PROPERTIES_BLOCK,
    RESTART_BYTES,
    VARINT32_BYTES,
    VARINT63_BYTES,
    BlockHandle,
    Footer,
    block_checksum,
    decode_block,
    decode_footer,
    decode_handle,
    decode_varint,
)
from keygroups.errors import IncompatibleSnapshot, SnapshotCorrupted

BytesLike: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"

# Blocks are read and decoded in runs of about this size: it stays in the cache.
_RUN_BYTES = 1 << 22
# Shared prefixes make keys larger than the file. Past this factor it is an attack.
_MAX_KEY_EXPANSION = 64
_SMALLEST_ENTRY_BYTES = 3

_Int64s = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


class RandomAccess(Protocol):
    """A file whose bytes can be read in any order."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""

    def read_at(self, offset: int, length: int, /) -> BytesLike:
        """The ``length`` bytes at ``offset``; fewer only if the file is truncated."""


class _InMemory:
    """A whole file in memory; reads are views."""

    def __init__(self, data: BytesLike) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def size_bytes(self) -> int:
        return len(self._view)

    def read_at(self, offset: int, length: int, /) -> memoryview:
        return self._view[offset : offset + length]


def read_sst(
    data: BytesLike, *, lower: bytes | None = None, upper: bytes | None = None
) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
    """Read keys and values of a table file that is in memory (or mapped into it).

    Args:
        data: The whole file.
        lower: Smallest key wanted; ``None`` for no bound.
        upper: First key no longer wanted; ``None`` for no bound.

    Returns:
        Keys and values with ``lower <= key < upper``, in key order.

    Raises:
        SnapshotCorrupted: If bytes that had to be read are damaged.
        IncompatibleSnapshot: If the file uses a feature that is not supported.
    """
    return SstReader(_InMemory(data)).read(lower, upper)


class SstReader:
    """Reads ranges of a table file, fetching only the blocks that can hold them.

    Opening reads footer, metaindex, properties and index. Format: RocksDB wiki, "Rocksdb
    BlockBasedTable Format"; checked on files of RocksDB 10.4 in format versions 2, 4, 5 and 6.

    Attributes:
        entry_count: Number of entries in the file, as its properties say; a read without
            bounds verifies it.

    Raises:
        SnapshotCorrupted: If the metadata is damaged.
        IncompatibleSnapshot: If the file uses a feature that is not supported.
    """

    def __init__(self, source: RandomAccess) -> None:
        self._source = source
        self._size = source.size_bytes
        if self._size < FOOTER_BYTES:
            raise SnapshotCorrupted(
                f"SST of {self._size} bytes is shorter than its footer of {FOOTER_BYTES}: truncated"
            )
        footer = self._fetch(self._size - FOOTER_BYTES, FOOTER_BYTES)
        self._footer: Footer = decode_footer(bytes(footer), self._size)
        meta = dict(self._meta_entries(self._footer.metaindex, "metaindex"))
        if PROPERTIES_BLOCK not in meta:
            raise IncompatibleSnapshot(f"SST has no properties block, only {sorted(meta)}")
        properties_at = decode_handle(meta[PROPERTIES_BLOCK], "properties")
        self._properties = _Properties(dict(self._meta_entries(properties_at, "properties")))
        self.entry_count: int = self._properties.number("num.entries")
        index_at = self._footer.index
        if index_at is None:
            if INDEX_BLOCK not in meta:
                raise SnapshotCorrupted(f"SST metaindex names no index block, only {sorted(meta)}")
            index_at = decode_handle(meta[INDEX_BLOCK], "index")
        block = self._block(index_at, "index")
        data_end = min(index_at.offset, self._footer.metaindex.offset, properties_at.offset)
        self._index = _Index(block, index_at.offset, data_end, self._properties)

    def __repr__(self) -> str:
        return f"SstReader({self.entry_count} entries, {len(self._index)} blocks)"

    def read(
        self, lower: bytes | None = None, upper: bytes | None = None
    ) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
        """Read the entries with ``lower <= key < upper``, in key order.

        Raises:
            SnapshotCorrupted: If a block that had to be read is damaged.
            IncompatibleSnapshot: If an entry is no plain value at sequence number 0.
        """
        first, stop = self._index.blocks_within(lower, upper)
        columns = self._columns(first, stop)
        for start, end in self._index.runs(first, stop):
            offsets, sizes = self._index.offsets[start:end], self._index.sizes[start:end]
            base = int(offsets[0])
            length = int(offsets[-1] + sizes[-1]) + BLOCK_TRAILER_BYTES - base
            run = self._fetch(base, length)
            for at, size in zip((offsets - base).tolist(), sizes.tolist(), strict=True):
                self._verify(run[at : at + size + BLOCK_TRAILER_BYTES], base + at)
            decode_blocks(np.frombuffer(run, np.uint8), base, offsets - base, sizes, columns)
        if stop - first == len(self._index) and columns.rows != self.entry_count:
            raise SnapshotCorrupted(
                f"SST holds {columns.rows} entries, its properties promise {self.entry_count}"
            )
        return columns.between(lower, upper)

    def _columns(self, first: int, stop: int) -> Columns:
        """Room for what the blocks can hold: no more than they and the properties allow."""
        bodies = int(self._index.sizes[first:stop].sum())
        raw_keys = self._properties.number("raw.key.size") - KEY_TRAILER_BYTES * self.entry_count
        return Columns(
            rows=min(self.entry_count, bodies // _SMALLEST_ENTRY_BYTES),
            key_bytes=min(raw_keys, bodies * _MAX_KEY_EXPANSION),
            value_bytes=min(self._properties.number("raw.value.size"), bodies),
        )

    def _fetch(self, offset: int, length: int) -> memoryview:
        data = memoryview(self._source.read_at(offset, length)).cast("B")
        if len(data) != length:
            raise SnapshotCorrupted(
                f"SST gave {len(data)} of {length} bytes at offset {offset}: truncated"
            )
        return data

    def _block(self, handle: BlockHandle, what: str) -> bytes:
        """Fetch and verify one block outside the data."""
        end = self._size - FOOTER_BYTES - BLOCK_TRAILER_BYTES
        if handle.offset + handle.size > end or handle.size < RESTART_BYTES:
            raise SnapshotCorrupted(
                f"SST {what} block of {handle.size} bytes at offset {handle.offset} does not fit "
                f"in a file of {self._size}"
            )
        block = self._fetch(handle.offset, handle.size + BLOCK_TRAILER_BYTES)
        self._verify(block, handle.offset)
        return bytes(block[: handle.size])

    def _meta_entries(self, handle: BlockHandle, what: str) -> Iterator[tuple[bytes, bytes]]:
        if handle.size > MAX_META_BLOCK_BYTES:
            raise SnapshotCorrupted(
                f"SST {what} block at offset {handle.offset} claims {handle.size} bytes; the "
                f"limit is {MAX_META_BLOCK_BYTES}"
            )
        return decode_block(self._block(handle, what), what)

    def _verify(self, block: memoryview, offset: int) -> None:
        """Compare a block, given with its trailer, with its checksum."""
        (stored,) = struct.unpack_from("<I", block, len(block) - 4)
        computed = block_checksum(
            self._footer.checksum_type, block[:-4], context=self._footer.context, offset=offset
        )
        if stored != computed:
            raise SnapshotCorrupted(
                f"SST block at offset {offset} of {len(block) - BLOCK_TRAILER_BYTES} bytes has "
                f"checksum {stored:08x}, its bytes give {computed:08x}"
            )
        if block[-BLOCK_TRAILER_BYTES] != NO_COMPRESSION:
            raise IncompatibleSnapshot(
                f"SST block at offset {offset} has compression type "
                f"{block[-BLOCK_TRAILER_BYTES]}; only uncompressed blocks (0) are supported"
            )


class _Properties:
    """The table properties; refuses the features that this reader does not know."""

    def __init__(self, entries: dict[bytes, bytes]) -> None:
        self._entries = entries
        comparator = entries.get(b"rocksdb.comparator", COMPARATOR)
        if comparator != COMPARATOR:
            raise IncompatibleSnapshot(
                f"SST is sorted by {comparator.decode(errors='replace')!r}, not bytewise"
            )
        index_type = entries.get(b"rocksdb.block.based.table.index.type", bytes(4))
        if index_type != bytes(4):
            raise IncompatibleSnapshot(
                f"SST index type {index_type.hex()} is not supported; binary search (0) is"
            )
        for name in ("deleted.keys", "merge.operands", "num.range-deletions"):
            count = self.number(name)
            if count:
                raise IncompatibleSnapshot(
                    f"SST has {name} = {count}; only files of plain values are supported"
                )
        for name in ("num.entries", "raw.key.size", "raw.value.size"):
            if b"rocksdb." + name.encode() not in entries:
                raise IncompatibleSnapshot(f"SST properties lack rocksdb.{name}")
        if self.number("raw.key.size") < KEY_TRAILER_BYTES * self.number("num.entries"):
            raise SnapshotCorrupted(
                f"SST properties give {self.number('raw.key.size')} bytes to the keys of "
                f"{self.number('num.entries')} entries: fewer than {KEY_TRAILER_BYTES} each"
            )

    def number(self, name: str) -> int:
        """A property that is a varint; 0 if absent."""
        text = self._entries.get(b"rocksdb." + name.encode(), b"\0")
        return decode_varint(text, 0, len(text), VARINT63_BYTES)[0]


class _Index:
    """The index block: per data block its handle and a key not less than its last.

    ``offsets`` and ``sizes`` are those of the data blocks, in file order.
    """

    def __init__(self, block: bytes, at: int, data_end: int, properties: _Properties) -> None:
        self._block = block
        has_key_trailer = properties.number("index.key.is.user.key") == 0
        is_delta = properties.number("index.value.is.delta.encoded") != 0
        count = int.from_bytes(block[-RESTART_BYTES:], "little")
        end = len(block) - RESTART_BYTES * (count + 1)
        if not 0 < count <= len(block) // RESTART_BYTES - 1:
            raise SnapshotCorrupted(
                f"SST index block at offset {at} of {len(block)} bytes claims {count} entries"
            )
        starts = np.frombuffer(block, "<u4", count, end).astype(np.int64)
        stops = np.append(starts[1:], end)
        data = np.frombuffer(block, np.uint8)
        # Every entry is a restart point (RocksDB's default), so all are decoded at once, and
        # a delta-encoded index, which has deltas only between restart points, has none.
        shared, here = decode_varints(data, starts, VARINT32_BYTES)
        key_sizes, here = decode_varints(data, here, VARINT32_BYTES)
        if not is_delta:
            _, here = decode_varints(data, here, VARINT32_BYTES)
        self._key_starts, here = here, here + key_sizes
        self.offsets, here = decode_varints(data, here, VARINT63_BYTES)
        self.sizes, here = decode_varints(data, here, VARINT63_BYTES)
        if np.any(here < stops) and not np.any(here > stops):
            raise IncompatibleSnapshot(
                f"SST index block at offset {at} has a restart interval above 1"
            )
        self._key_sizes = key_sizes - (KEY_TRAILER_BYTES if has_key_trailer else 0)
        if starts[0] != 0 or np.any(here != stops) or np.any(shared) or self._key_sizes.min() < 0:
            raise SnapshotCorrupted(f"SST index block at offset {at} has entries that do not fit")
        # Ordered, apart and within the data: so their sizes add up to no more than the file.
        ends = self.offsets + self.sizes + BLOCK_TRAILER_BYTES
        limits = np.append(self.offsets[1:], data_end)
        outside = (self.offsets > data_end) | (self.sizes > data_end)  # also if `ends` overflowed
        wrong = np.flatnonzero((ends > limits) | outside)
        if len(wrong):
            block_at, size = int(self.offsets[wrong[0]]), int(self.sizes[wrong[0]])
            raise SnapshotCorrupted(
                f"SST index block at offset {at} puts a block of {size} bytes at offset "
                f"{block_at}, where only {int(limits[wrong[0]]) - block_at} are left for it"
            )

    def __len__(self) -> int:
        return len(self.offsets)

    def _key(self, block: int) -> bytes:
        start = int(self._key_starts[block])
        return self._block[start : start + int(self._key_sizes[block])]

    def blocks_within(self, lower: bytes | None, upper: bytes | None) -> tuple[int, int]:
        """The blocks ``[first, stop)`` that can hold keys in ``[lower, upper)``."""
        if lower is not None and upper is not None and lower >= upper:
            return 0, 0
        first = 0 if lower is None else lower_bound(len(self), self._key, lower)
        if upper is None:
            return first, len(self)
        # The first block whose last key reaches `upper` can still hold smaller ones.
        last = lower_bound(len(self), self._key, upper)
        return first, max(first, min(last + 1, len(self)))

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut blocks into runs without gaps between them, of some MiB or one block."""
        while first < stop:
            ends = self.offsets[first:stop] + self.sizes[first:stop] + BLOCK_TRAILER_BYTES
            count = int(np.searchsorted(ends, self.offsets[first] + _RUN_BYTES, side="right"))
            gaps = np.flatnonzero(self.offsets[first + 1 : stop] != ends[:-1])
            if len(gaps):
                count = min(count, int(gaps[0]) + 1)
            yield first, first + max(1, count)
            first += max(1, count)
