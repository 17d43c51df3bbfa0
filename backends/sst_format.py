"""Layout of RocksDB's block-based table file ("SST"): what writer and reader share.

A file is ``data blocks | meta blocks | index block | footer``. A block is a body, an
array of restart offsets, its count, then outside the block handle one compression byte and a
checksum of four bytes. Source of the format: RocksDB wiki, "Rocksdb BlockBasedTable Format",
checked against files written by RocksDB 10.4 (format versions 2, 4, 5 and 6) and against
the readers of RocksDB 7.8 and 10.4.

Everything here works on small metadata blocks, one entry at a time; the data blocks are the
business of :mod:`.sst_writer` and :mod:`.sst_reader`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from keygroups.errors import IncompatibleSnapshot, SnapshotCorrupted

MAGIC = 0x88E241B785F4CFF7
EXTENDED_MAGIC = b"\x3e\x00\x7a\x00"
FOOTER_BYTES = 53
# Compression type (1) and checksum (4) follow every block and are not in its handle's size.
BLOCK_TRAILER_BYTES = 5
RESTART_BYTES = 4
# Sequence number 0 << 8 | type 1 ("value"), little-endian: what an ingested file must hold.
KEY_TRAILER = struct.pack("<Q", 1)
KEY_TRAILER_BYTES = len(KEY_TRAILER)
VARINT32_BYTES = 5
# Handles above 2^63 cannot point into a file, so the tenth byte of a varint64 is never read.
VARINT63_BYTES = 9
# Metadata of a real file is some KiB; the limits keep a forged one from costing time.
MAX_META_BLOCK_BYTES = 1 << 24
MAX_META_KEY_BYTES = 1 << 12

NO_COMPRESSION = 0
CHECKSUM_XXH32, CHECKSUM_XXH64, CHECKSUM_XXH3 = 2, 3, 4
_CHECKSUM_NAMES = {0: "none", 1: "CRC32C"}
# Version 1 lacks nothing we read, but nobody has written it by default since RocksDB 3.10.
OLDEST_VERSION, CONTEXT_CHECKSUM_VERSION, NEWEST_VERSION = 2, 6, 6

PROPERTIES_BLOCK = b"rocksdb.properties"
INDEX_BLOCK = b"rocksdb.index"
COMPARATOR = b"leveldb.BytewiseComparator"


class BlockHandle(NamedTuple):
    """Where a block lies; ``size`` leaves out the trailer of five bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Footer:
    """The last 53 bytes of a file, decoded.

    Attributes:
        version: Format version, 2 to 6.
        checksum_type: One of the ``CHECKSUM_*`` numbers.
        context: Salt of every checksum by block offset; 0 before version 6.
        metaindex: The block that names the meta blocks.
        index: The index block; ``None`` from version 6 on, where the metaindex names it.
    """

    version: int
    checksum_type: int
    context: int
    metaindex: BlockHandle
    index: BlockHandle | None


def encode_varint(value: int) -> bytes:
    """Encode a non-negative integer in groups of seven bits, lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, at: int, end: int, max_bytes: int) -> tuple[int, int]:
    """Decode the varint at ``at``; returns it and the position behind it.

    Raises:
        SnapshotCorrupted: If it runs past ``end`` or is longer than ``max_bytes``.
    """
    value = 0
    for i in range(min(max_bytes, end - at)):
        byte = data[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise SnapshotCorrupted(f"SST varint at byte {at} of a block of {end} bytes does not end")


def encode_handle(handle: BlockHandle) -> bytes:
    """Encode offset and size as two varints."""
    return encode_varint(handle.offset) + encode_varint(handle.size)


def decode_handle(data: bytes, what: str) -> BlockHandle:
    """Decode the handle at the start of ``data``."""
    try:
        offset, at = decode_varint(data, 0, len(data), VARINT63_BYTES)
        size, _ = decode_varint(data, at, len(data), VARINT63_BYTES)
    except SnapshotCorrupted as error:
        raise SnapshotCorrupted(f"SST handle of the {what} block: {error}") from error
    return BlockHandle(offset, size)


def block_checksum(checksum_type: int, block: memoryview, *, context: int, offset: int) -> int:
    """Checksum of a block as stored in the file.

    Args:
        checksum_type: One of the ``CHECKSUM_*`` numbers.
        block: The block and its compression byte.
        context: Salt from the footer, 0 for none.
        offset: Offset of the block in the file; counts only with a salt.
    """
    if checksum_type == CHECKSUM_XXH64:
        value = xxhash.xxh64_intdigest(block) & 0xFFFFFFFF
    elif checksum_type == CHECKSUM_XXH3:
        value = xxhash.xxh3_64_intdigest(block[:-1]) & 0xFFFFFFFF
        value ^= block[-1] * 0x6B9083D9 & 0xFFFFFFFF
    else:
        assert checksum_type == CHECKSUM_XXH32, checksum_type
        value = xxhash.xxh32_intdigest(block)
    if context:
        value += context ^ ((offset & 0xFFFFFFFF) + (offset >> 32) & 0xFFFFFFFF)
    return value & 0xFFFFFFFF


def seal(block: bytes) -> bytes:
    """Append the trailer of an uncompressed block with an XXH64 checksum."""
    typed = block + bytes([NO_COMPRESSION])
    value = block_checksum(CHECKSUM_XXH64, memoryview(typed), context=0, offset=0)
    return typed + struct.pack("<I", value)


def encode_block(entries: list[tuple[bytes, bytes]]) -> bytes:
    """Build a block whose every entry is a restart point, as index and meta blocks are."""
    parts: list[bytes] = []
    restarts: list[int] = []
    size = 0
    for key, value in entries:
        restarts.append(size)
        header = b"\0" + encode_varint(len(key)) + encode_varint(len(value))
        parts += (header, key, value)
        size += len(header) + len(key) + len(value)
    parts.append(struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts)))
    return b"".join(parts)


def decode_block(block: bytes, what: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a small metadata block.

    Raises:
        SnapshotCorrupted: If a length does not fit in the block.
    """
    count = int.from_bytes(block[-RESTART_BYTES:], "little")
    end = len(block) - RESTART_BYTES * (count + 1)
    if count == 0 or end < 0:
        raise SnapshotCorrupted(
            f"SST {what} block of {len(block)} bytes claims {count} restart points"
        )
    key = b""
    at = 0
    while at < end:
        shared, at = decode_varint(block, at, end, VARINT32_BYTES)
        unshared, at = decode_varint(block, at, end, VARINT32_BYTES)
        size, at = decode_varint(block, at, end, VARINT32_BYTES)
        fits = shared <= len(key) and unshared + size <= end - at
        if not fits or shared + unshared > MAX_META_KEY_BYTES:
            raise SnapshotCorrupted(
                f"SST {what} block: entry at byte {at} shares {shared} and adds {unshared} bytes "
                f"of key and {size} of value, but {len(key)} and {end - at} bytes are there"
            )
        key = key[:shared] + block[at : at + unshared]
        at += unshared + size
        yield key, block[at - size : at]


def encode_footer(metaindex: BlockHandle, index: BlockHandle) -> bytes:
    """Build the footer of a version 2 file with XXH64 checksums."""
    handles = encode_handle(metaindex) + encode_handle(index)
    return bytes([CHECKSUM_XXH64]) + handles.ljust(40, b"\0") + struct.pack("<IQ", 2, MAGIC)


def decode_footer(footer: bytes, file_size: int) -> Footer:
    """Decode the last 53 bytes of a file of ``file_size`` bytes.

    Raises:
        SnapshotCorrupted: If it is no footer of a block-based table, or damaged.
        IncompatibleSnapshot: If version or checksum type is not supported.
    """
    offset = file_size - FOOTER_BYTES
    version, magic = struct.unpack_from("<IQ", footer, 41)
    if magic != MAGIC:
        raise SnapshotCorrupted(
            f"SST footer at offset {offset} ends with {magic:016x}, not with {MAGIC:016x}: "
            "the file is truncated, altered, or no block-based table"
        )
    if not OLDEST_VERSION <= version <= NEWEST_VERSION:
        raise IncompatibleSnapshot(
            f"SST format version {version} is not supported; "
            f"{OLDEST_VERSION} to {NEWEST_VERSION} are"
        )
    checksum_type = footer[0]
    if checksum_type not in (CHECKSUM_XXH32, CHECKSUM_XXH64, CHECKSUM_XXH3):
        raise IncompatibleSnapshot(
            f"SST checksum type {checksum_type} "
            f"({_CHECKSUM_NAMES.get(checksum_type, 'unknown')}) is not supported; "
            "xxHash (2), xxHash64 (3) and XXH3 (4) are"
        )
    if version >= CONTEXT_CHECKSUM_VERSION:
        return _decode_extended(footer, offset, version)
    metaindex_offset, at = decode_varint(footer, 1, 41, VARINT63_BYTES)
    metaindex_size, at = decode_varint(footer, at, 41, VARINT63_BYTES)
    index_offset, at = decode_varint(footer, at, 41, VARINT63_BYTES)
    index_size, at = decode_varint(footer, at, 41, VARINT63_BYTES)
    return Footer(
        version,
        checksum_type,
        0,
        BlockHandle(metaindex_offset, metaindex_size),
        BlockHandle(index_offset, index_size),
    )


def _decode_extended(footer: bytes, offset: int, version: int) -> Footer:
    """Decode the part of a version 6 footer that differs; it has a checksum of its own."""
    if footer[1:5] != EXTENDED_MAGIC:
        raise SnapshotCorrupted(
            f"SST footer at offset {offset} has {footer[1:5].hex()} where a version "
            f"{version} footer has {EXTENDED_MAGIC.hex()}"
        )
    stored, context, metaindex_size = struct.unpack_from("<III", footer, 5)
    blanked = memoryview(footer[:5] + bytes(4) + footer[9:])
    computed = block_checksum(footer[0], blanked, context=context, offset=offset)
    if stored != computed:
        raise SnapshotCorrupted(
            f"SST footer at offset {offset} has checksum {stored:08x}, its bytes give "
            f"{computed:08x}"
        )
    metaindex_offset = offset - BLOCK_TRAILER_BYTES - metaindex_size
    if metaindex_offset < 0:
        raise SnapshotCorrupted(
            f"SST metaindex of {metaindex_size} bytes does not fit before offset {offset}"
        )
    metaindex = BlockHandle(metaindex_offset, metaindex_size)
    return Footer(version, footer[0], context, metaindex, None)
