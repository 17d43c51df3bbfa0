"""Backends: how the rows of a segment become a file, and come back.

A backend knows one encoding and nothing of ranges, runs or commits. It is found by name
through the entry point group ``keygroups.backends``, so that anybody can add one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.buffers import one_chunk
from keygroups.errors import IncompatibleSnapshot, InvalidArgument, SnapshotCorrupted
from keygroups.snapshot.storage import WritableFile

ENTRY_POINT_GROUP = "keygroups.backends"
KEY_GROUP = pa.field("key_group", pa.uint16(), nullable=False)
KEY_HASH = pa.field("key_hash", pa.int32(), nullable=False)


@dataclass(frozen=True, slots=True)
class RowSchema:
    """The columns of a state's rows.

    Attributes:
        key: Key columns.
        value: Value columns.
    """

    key: tuple[pa.Field, ...]
    value: tuple[pa.Field, ...]

    @property
    def stored(self) -> pa.Schema:
        """``key_group``, ``key_hash``, then the key and the value columns."""
        return pa.schema([KEY_GROUP, KEY_HASH, *self.key, *self.value])

    @property
    def user(self) -> pa.Schema:
        """The key and the value columns."""
        return pa.schema([*self.key, *self.value])

    def key_array(self, rows: pa.Table) -> pa.Array:
        """Returns the keys of ``rows``: the one key column, or a struct of several."""
        columns = [one_chunk(rows.column(field.name)) for field in self.key]
        if len(columns) == 1:
            return columns[0]
        return pa.StructArray.from_arrays(columns, fields=list(self.key))

    def key_columns(self, keys: pa.Array) -> list[pa.Array]:
        """Returns the key columns of such an array."""
        return [keys] if len(self.key) == 1 else keys.flatten()

    @property
    def key_type(self) -> pa.DataType:
        """The type of such an array."""
        return self.key[0].type if len(self.key) == 1 else pa.struct(self.key)


class ReadableSegment(Protocol):
    """An open segment.

    Attributes:
        path: For messages.
        size_bytes: Its size.
        is_verified: Whether its digest is known to be right, so that checksums inside tell
            nothing more.
    """

    path: str
    size_bytes: int
    is_verified: bool

    def read_at(self, offset: int, size_bytes: int, /) -> bytes | memoryview:
        """Returns ``size_bytes`` bytes from ``offset``."""

    def as_arrow(self) -> pa.NativeFile:
        """Returns it as a file of Arrow's."""


class Backend(Protocol):
    """One encoding of segments.

    Attributes:
        name: What options and manifests call it.
        suffix: What its files end with, without the dot.
        segment_size_bytes: How much data (by Arrow's size of it) a segment should hold.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]
    segment_size_bytes: ClassVar[int]

    def write_segment(self, sink: WritableFile, schema: RowSchema, rows: pa.Table) -> None:
        """Writes ``rows`` (the columns of ``schema.stored``, sorted, at least one row)."""

    def footer_size_bytes(self, source: ReadableSegment) -> int:
        """Returns how many bytes at the end of a segment no checksum inside it covers.

        They get a digest of their own in the manifest, so that a part of the segment can be read
        in safety: 0 if there are none, the whole size if there are no checksums at all.
        """

    def read_segment(
        self,
        source: ReadableSegment,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> pa.Table:
        """Reads the rows of ``key_groups``, of which only ``columns``, checking what it reads.

        Args:
            columns: Names of ``schema.stored``; the result has them in this order.

        Raises:
            SnapshotCorrupted: If the bytes are damaged.
        """


@functools.cache
def get_backend(name: str) -> Backend:
    """Returns the backend of that name.

    Raises:
        InvalidArgument: If there is none; the message lists those there are.
    """
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        raise InvalidArgument(
            f"unknown backend {name!r:.100}; installed are {', '.join(sorted(found)) or 'none'}"
        )
    backend: Backend = found[name].load()()
    return backend


def backend_of_snapshot(name: str) -> Backend:
    """As :func:`get_backend`, for a name that stands in a manifest.

    Raises:
        IncompatibleSnapshot: If there is none of that name.
    """
    try:
        return get_backend(name)
    except InvalidArgument as error:
        raise IncompatibleSnapshot(f"{error}; install the package that has it") from None


def slice_key_groups(
    table: pa.Table,
    schema: RowSchema,
    key_groups: KeyGroupRange,
    columns: Sequence[str],
) -> pa.Table:
    """Returns rows of ``key_groups``, of which ``columns``, of a table sorted by key group.

    The table has stored columns, of which at least these and ``key_group``.

    Raises:
        SnapshotCorrupted: If its columns are not those of the schema.
    """
    stored = schema.stored
    found = table.column_names
    expected = pa.schema([stored.field(name) for name in found if name in stored.names])
    if not table.schema.equals(expected) or not {"key_group", *columns} <= set(found):
        raise SnapshotCorrupted(
            f"it has the columns {table.schema!s:.500}, the manifest says {stored!s:.500}"
        )
    group = table.column("key_group").to_numpy()
    start = int(np.searchsorted(group, key_groups.start, side="left"))
    end = int(np.searchsorted(group, key_groups.end, side="right"))
    return table.slice(start, end - start).select(list(columns))
