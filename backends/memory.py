"""Segments as Arrow's own memory: the plainest encoding, and the model for the others.

A file is one Arrow IPC file of the stored columns, uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.errors import KeyGroupsError, SnapshotCorrupted
from keygroups.snapshot.backend import ReadableSegment, RowSchema, slice_key_groups
from keygroups.snapshot.storage import WritableFile


class MemoryBackend:
    """See :class:`keygroups.snapshot.backend.Backend`."""

    name: ClassVar[str] = "memory"
    suffix: ClassVar[str] = "arrow"
    segment_size_bytes: ClassVar[int] = 8 << 20

    def write_segment(self, sink: WritableFile, schema: RowSchema, rows: pa.Table) -> None:
        """Writes the rows as one Arrow IPC file."""
        with pa.ipc.new_file(pa.PythonFile(sink, "w"), schema.stored) as writer:
            writer.write_table(rows)

    def footer_size_bytes(self, source: ReadableSegment) -> int:
        """Arrow IPC has no checksums."""
        return source.size_bytes

    def read_segment(
        self,
        source: ReadableSegment,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> pa.Table:
        """Reads the whole file and slices it."""
        try:
            with pa.ipc.open_file(source.as_arrow()) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except KeyGroupsError:  # of the storage below
            raise
        except (pa.ArrowException, OSError) as error:
            raise SnapshotCorrupted(f"it is no readable Arrow file: {error}") from error
        return slice_key_groups(table, schema, key_groups, columns)
