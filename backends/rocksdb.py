"""Segments as SST files that RocksDB itself ingests and reads.

A key is the key group (2 bytes, big-endian), the key hash (4 bytes, big-endian, sign bit
flipped) and the key bytes; so RocksDB's bytewise order is the snapshot's order, a key group
is one contiguous range of keys, and the hash that a change of max parallelism needs is at
hand. A value is the row encoding of the value columns. FORMAT.md, "SST segments".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.assignment import KeyGroupRange
from keygroups.backends.sst import SstReader, write_sst
from keygroups.buffers import binary_array, fixed_width_binary, gather, value_offsets
from keygroups.errors import SnapshotCorrupted
from keygroups.keys import decode_keys, encode_keys
from keygroups.snapshot.backend import ReadableSegment, RowSchema
from keygroups.snapshot.rows import decode_rows, encode_rows
from keygroups.snapshot.storage import WritableFile

PREFIX_SIZE_BYTES = 6
_SIGN = np.uint32(1 << 31)
_EMPTY = pa.scalar(b"", pa.large_binary())


class RocksDbBackend:
    """See :class:`keygroups.snapshot.backend.Backend`."""

    name: ClassVar[str] = "rocksdb"
    suffix: ClassVar[str] = "sst"
    segment_size_bytes: ClassVar[int] = 16 << 20  # RocksDB takes 2 to 3 ms to ingest a file

    def write_segment(self, sink: WritableFile, schema: RowSchema, rows: pa.Table) -> None:
        """Writes the rows as one SST file."""
        batch = rows.combine_chunks()
        prefix = np.empty((batch.num_rows, PREFIX_SIZE_BYTES), np.uint8)
        group = batch.column("key_group").to_numpy().astype(">u2")
        key_hash = batch.column("key_hash").to_numpy().view(np.uint32) ^ _SIGN
        prefix[:, :2] = group.view(np.uint8).reshape(-1, 2)
        prefix[:, 2:] = key_hash.astype(">u4").view(np.uint8).reshape(-1, 4)
        keys = pc.binary_join_element_wise(
            fixed_width_binary(prefix), encode_keys([schema.key_array(rows)]), _EMPTY
        )
        values = [batch.column(field.name).combine_chunks() for field in schema.value]
        write_sst(sink, keys, encode_rows(values, batch.num_rows))

    def footer_size_bytes(self, source: ReadableSegment) -> int:  # noqa: ARG002 - protocol
        """Every block has a checksum, and the fixed footer is checked field by field."""
        return 0

    def read_segment(
        self,
        source: ReadableSegment,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> pa.Table:
        """Reads the blocks that hold key groups of the range; values only if asked for."""
        lower = key_groups.start.to_bytes(2, "big")
        upper = (key_groups.end + 1).to_bytes(2, "big")
        keys, values = SstReader(source).read(lower, upper)
        arrays = _decode_prefixed_keys(keys, schema)
        value_names = [field.name for field in schema.value]
        if set(columns) & set(value_names):
            types = [field.type for field in schema.value]
            arrays.update(zip(value_names, decode_rows(values, types), strict=True))
        stored = schema.stored
        return pa.table(
            [arrays[name] for name in columns],
            schema=pa.schema([stored.field(name) for name in columns]),
        )


def _decode_prefixed_keys(keys: pa.LargeBinaryArray, schema: RowSchema) -> dict[str, pa.Array]:
    """The columns that SST keys hold: key group, key hash and the key columns."""
    offsets = value_offsets(keys)
    lengths = np.diff(offsets)
    if (lengths < PREFIX_SIZE_BYTES).any():
        raise SnapshotCorrupted(f"a key of {lengths.min()} bytes has no room for its prefix")
    data = np.frombuffer(keys.buffers()[2], np.uint8)
    prefix = gather(data, offsets[:-1], offsets[:-1] + PREFIX_SIZE_BYTES)
    prefix = prefix.reshape(-1, PREFIX_SIZE_BYTES)
    group = np.ascontiguousarray(prefix[:, :2]).view(">u2").reshape(-1).astype(np.uint16)
    key_hash = np.ascontiguousarray(prefix[:, 2:]).view(">u4").reshape(-1).astype(np.uint32) ^ _SIGN
    rest = gather(data, offsets[:-1] + PREFIX_SIZE_BYTES, offsets[1:])
    ends = np.concatenate(([0], np.cumsum(lengths - PREFIX_SIZE_BYTES)))
    encoded = binary_array(rest, ends)
    key_columns = schema.key_columns(decode_keys(encoded, [schema.key_type])[0])
    return {
        "key_group": pa.array(group),
        "key_hash": pa.array(key_hash.view(np.int32)),
        **dict(zip((field.name for field in schema.key), key_columns, strict=True)),
    }
