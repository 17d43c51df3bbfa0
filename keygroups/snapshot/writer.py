"""Writing: rows become runs of segments, runs become a committed snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.assignment import (
    KeyGroupRange,
    check_parallelism,
    default_max_parallelism,
    key_group_ranges,
)
from keygroups.buffers import (
    Int64s,
    byte_spans,
    fixed_width_values,
    is_fixed_width,
    is_variable_width,
)
from keygroups.errors import InvalidArgument, SnapshotCorrupted
from keygroups.snapshot.backend import Backend, RowSchema, get_backend
from keygroups.snapshot.commit import Attempt, check_digest, wrong_size
from keygroups.snapshot.digest import digest_bytes, digest_rows
from keygroups.snapshot.index import SegmentIndex
from keygroups.snapshot.manifest import (
    Footer,
    Operator,
    Run,
    Segment,
    State,
    StoredFile,
    check_operator,
)
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.rows import encode_rows, with_declared_nulls
from keygroups.snapshot.sort import MEMORY_BUDGET_BYTES, Sorter, add_key_groups
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.types import type_from_json, type_to_json

DEFAULT_UID = "operator"
DEFAULT_STATE = "state"


@dataclass(frozen=True)
class WrittenRun:
    """A run whose files are durable but not yet committed, and the index of its segments."""

    run: Run
    index: list[SegmentIndex]


def write_snapshot(
    path: str | PathLike[str],
    rows: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
    *,
    key: str | Sequence[str],
    max_parallelism: int | None = None,
    parallelism: int = 1,
    backend: str = "parquet",
    scheme: str = "flink",
    uid: str = DEFAULT_UID,
    state: str = DEFAULT_STATE,
    overwrite: bool = False,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
) -> Snapshot:
    """Writes keyed rows as a savepoint: all of it, or nothing that anybody sees.

    Args:
        path: A directory on a local disk.
        rows: The rows, in any order, each key once. Batches are consumed one by one.
        key: The key column, or several: a list, or names joined by commas.
        max_parallelism: How many key groups, 1 to 32768; Flink's default for the parallelism
            if ``None``. Fixed for the operator until :func:`keygroups.rescale` changes it.
        parallelism: How many ranges, at most ``max_parallelism``.
        backend: ``"parquet"`` or ``"rocksdb"``, or the name of another installed one.
        scheme: How keys are hashed: ``"flink"``, ``"murmur3"`` or ``"spark"``.
        uid: The operator uid.
        state: The name of the state.
        overwrite: Replace a snapshot that is there, once the new one is durable.
        memory_budget_bytes: How many bytes of rows to hold before they are spilled to disk.

    Returns:
        The committed snapshot.

    Raises:
        InvalidArgument: If an argument is out of bounds, a key is null or there twice, or a
            column has a type that state cannot have.
        SnapshotExists: If a snapshot is there and ``overwrite`` is false.
        StorageUnavailable: If the disk refuses.
    """
    if max_parallelism is None:
        max_parallelism = default_max_parallelism(parallelism)
    check_parallelism(max_parallelism, parallelism)
    ranges = key_group_ranges(max_parallelism, parallelism)
    store = get_backend(backend)
    arrow_schema, tables = _as_tables(rows)
    schema = row_schema(arrow_schema, key)
    operator = Operator(
        uid=uid,
        max_parallelism=max_parallelism,
        scheme=scheme,
        ranges=tuple(ranges),
        key=schema.key,
        epoch=0,
        watermark_ms=None,
        states=(State(state, "value", backend, schema.value, ()),),
    )
    check_operator(operator)
    storage = LocalStorage(path)
    with Attempt.begin(storage, overwrite=overwrite) as attempt:
        with Sorter(schema, max_parallelism, attempt.spill_folder, memory_budget_bytes) as sorter:
            for table in tables:
                user_rows = conform(table, schema)
                sorter.add(add_key_groups(user_rows, schema, scheme, max_parallelism))
            written = write_runs(attempt, sorter.sorted_tables(), ranges, schema, store)
        commit_operator(attempt, operator, [written])
    return Snapshot.open(path)


def row_schema(arrow_schema: pa.Schema, key: str | Sequence[str]) -> RowSchema:
    """Splits the columns of rows into key and value columns, as a snapshot stores them.

    Raises:
        InvalidArgument: If a key column is missing or a type cannot be stored.
    """
    names = key.split(",") if isinstance(key, str) else list(key)
    names = [name.strip() for name in names]
    for name in names:
        if arrow_schema.get_field_index(name) < 0:
            raise InvalidArgument(
                f"key column {name!r} is not one column of {', '.join(arrow_schema.names)!r:.500}"
            )
    fields = {field.name: _storable(field) for field in arrow_schema}
    if len(names) == 1:  # a single key is never null; a component of a tuple may be
        fields[names[0]] = fields[names[0]].with_nullable(False)
    value = tuple(_storable(field) for field in arrow_schema if field.name not in names)
    return RowSchema(tuple(fields[name] for name in names), value)


def conform(rows: pa.Table, schema: RowSchema) -> pa.Table:
    """Returns ``rows`` with the columns of ``schema.user``, plainly encoded.

    Raises:
        InvalidArgument: If a column is missing, has another type, or a null where none may be.
    """
    columns = []
    for field in schema.user:
        if rows.schema.get_field_index(field.name) < 0:
            raise InvalidArgument(f"a batch of rows has no column {field.name!r}")
        column = rows.column(field.name)
        if _storable(rows.schema.field(field.name)).type != field.type:
            raise InvalidArgument(
                f"a batch of rows has {column.type} in column {field.name!r}, the first had "
                f"{field.type}"
            )
        if column.type != field.type:
            column = column.cast(field.type)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise InvalidArgument(
                f"column {field.name!r} is not valid {field.type}: {error}; a string is UTF-8, "
                f"cast other bytes to binary"
            ) from None
        if not field.nullable and column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise InvalidArgument(
                f"column {field.name!r} is null in row {row}; a key (and a column declared not "
                f"null) has a value in every row: filter the row out or fill it"
            )
        columns.append(_with_declared_nulls(field.name, column))
    return pa.table(columns, schema=schema.user)


def _with_declared_nulls(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        chunks = [with_declared_nulls(chunk) for chunk in column.chunks]
    except SnapshotCorrupted as error:
        raise InvalidArgument(f"column {name!r}: {error}") from None
    return pa.chunked_array(chunks, column.type)


def write_runs(
    attempt: Attempt,
    sorted_tables: Iterable[pa.Table],
    ranges: Sequence[KeyGroupRange],
    schema: RowSchema,
    backend: Backend,
    epoch: int = 0,
) -> list[WrittenRun]:
    """Writes rows in snapshot order as one run a range, in one pass; empty ranges have none."""
    written: list[WrittenRun] = []
    remaining = iter(ranges)
    writer: RunWriter | None = None
    for table in sorted_tables:
        while table.num_rows:
            first_group = table.column("key_group")[0].as_py()
            while writer is None or first_group > writer.key_groups.end:
                written += writer.close() if writer else []
                writer = RunWriter(attempt, next(remaining), schema, backend, epoch)
            group = table.column("key_group").to_numpy()
            end = int(np.searchsorted(group, writer.key_groups.end, side="right"))
            writer.append(table.slice(0, end))
            table = table.slice(end)
    return written + (writer.close() if writer else [])


class RunWriter:
    """Writes one run: takes sorted rows, cuts them into segments of whole key groups.

    Attributes:
        key_groups: The range that the run is for.
    """

    def __init__(
        self,
        attempt: Attempt,
        key_groups: KeyGroupRange,
        schema: RowSchema,
        backend: Backend,
        epoch: int = 0,
    ) -> None:
        self.key_groups = key_groups
        self._attempt = attempt
        self._folder = attempt.new_run_folder(key_groups)
        self._schema = schema
        self._backend = backend
        self._epoch = epoch
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._segments: list[Segment] = []
        self._index: list[SegmentIndex] = []

    def append(self, rows: pa.Table) -> None:
        """Takes the next rows (stored columns, in snapshot order, within the range)."""
        borders, sizes = self._borders(rows)
        start, last = 0, len(borders) - 1
        while start < last:
            room_bytes = self._backend.segment_size_bytes - self._held_bytes
            end = int(np.searchsorted(sizes, sizes[start] + room_bytes, side="right")) - 1
            if end <= start and not self._held:
                end = start + 1  # it fits no segment: it becomes one of its own
            if end > start:
                self._held.append(rows.slice(borders[start], borders[end] - borders[start]))
                self._held_bytes += int(sizes[end] - sizes[start])
            if end < last:
                self._flush()
            start = max(start, end)

    def copy(self, storage: LocalStorage, segment: Segment, index: SegmentIndex) -> None:
        """Takes the next rows as a whole segment of another snapshot, byte for byte.

        Raises:
            SnapshotCorrupted: If it has not the size and digest that it should have.
        """
        self._flush()
        path = self._attempt.segment_path(self._folder, len(self._segments), self._backend.suffix)
        size_bytes = storage.size_bytes(segment.file.path)
        if size_bytes != segment.file.size_bytes:
            raise wrong_size(storage, segment.file, size_bytes)
        digest = self._attempt.storage.copy(path, storage, segment.file.path)
        check_digest(storage, segment.file, digest)
        self._segments.append(replace(segment, file=replace(segment.file, path=path)))
        self._index.append(index)

    def close(self) -> list[WrittenRun]:
        """Writes what is held and returns the run; none if it has no rows."""
        self._flush()
        if not self._segments:
            return []
        run = Run("base", self._epoch, self.key_groups, tuple(self._segments))
        return [WrittenRun(run, self._index)]

    def _footer(self, path: str) -> Footer | None:
        with self._attempt.storage.open(path) as file:
            size_bytes = self._backend.footer_size_bytes(file)
            data = file.read_at(file.size_bytes - size_bytes, size_bytes)
        return Footer(size_bytes, digest_bytes(data)) if data else None

    def _borders(self, rows: pa.Table) -> tuple[Int64s, Int64s]:
        """Rows before which a segment may begin, and the size of all rows before each.

        These are the first rows of key groups, and places inside a group too large for one
        segment.
        """
        columns = [rows.column(field.name).combine_chunks() for field in self._schema.user]
        borders = group_borders(rows)
        sizes = _size_up_to(columns, borders)
        pieces = -(-np.diff(sizes) // self._backend.segment_size_bytes)
        if (pieces <= 1).all():
            return borders, sizes
        split = [
            np.linspace(start, end, max(1, count), endpoint=False, dtype=np.int64)
            for start, end, count in zip(borders, borders[1:], pieces.tolist(), strict=False)
        ]
        borders = np.unique(np.concatenate([*split, borders[-1:]]))
        return borders, _size_up_to(columns, borders)

    def _flush(self) -> None:
        if not self._held:
            return
        rows = pa.concat_tables(self._held).combine_chunks()
        self._held, self._held_bytes = [], 0
        path = self._attempt.segment_path(self._folder, len(self._segments), self._backend.suffix)
        with self._attempt.storage.create(path) as file:
            self._backend.write_segment(file, self._schema, rows)
            digest = file.close_durably()
        stored = StoredFile(path, file.size_bytes, digest)
        self._segments.append(Segment(stored, rows.num_rows, self._footer(path)))
        self._index.append(index_segment(rows, self._schema))


def index_segment(rows: pa.Table, schema: RowSchema) -> SegmentIndex:
    """Returns the index of a segment's rows (stored columns, sorted, at least one row)."""
    borders = group_borders(rows)
    group = rows.column("key_group").to_numpy()
    columns = [rows.column(field.name).combine_chunks() for field in schema.user]
    digests = digest_rows(columns, rows.num_rows)
    return SegmentIndex(
        key_group=group[borders[:-1]],
        rows=np.diff(borders).astype(np.uint64),
        size_bytes=np.diff(_size_up_to(columns, borders)).astype(np.uint64),
        digest=np.add.reduceat(digests, borders[:-1]),
    )


def commit_operator(
    attempt: Attempt, operator: Operator, written: Sequence[Sequence[WrittenRun]]
) -> None:
    """Commits one operator, given the written runs of each of its states."""
    states = tuple(
        replace(state, runs=tuple(w.run for w in runs))
        for state, runs in zip(operator.states, written, strict=True)
    )
    index = [w.index for runs in written for w in runs]
    attempt.commit([replace(operator, states=states)], index)


def group_borders(rows: pa.Table) -> Int64s:
    """Returns the first row of each key group, ascending, and the number of rows."""
    group = rows.column("key_group").to_numpy()
    inner = np.flatnonzero(np.diff(group)) + 1
    return np.concatenate(([0], inner, [len(group)])).astype(np.int64)


def _size_up_to(columns: Sequence[pa.Array], borders: Int64s) -> Int64s:
    """The size of the data (FORMAT.md, "Size") in the rows before each border."""
    sizes = np.zeros(len(borders), np.int64)
    for column in columns:
        if is_fixed_width(column.type):
            sizes += borders * fixed_width_values(column.slice(0, 0)).shape[1]
            continue
        if not is_variable_width(column.type):
            column = encode_rows([column], len(column))
        offsets = byte_spans(column)[1]
        sizes += offsets[borders]
    return sizes


def _storable(field: pa.Field) -> pa.Field:
    """The field without encodings that a snapshot has no use for.

    Raises:
        InvalidArgument: If state cannot have the type.
    """
    data_type = field.type
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    data_type = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(
        data_type, data_type
    )
    try:
        data_type = type_from_json(type_to_json(data_type))  # as it will be read
    except InvalidArgument as error:
        raise InvalidArgument(f"column {field.name!r}: {error}") from None
    return pa.field(field.name, data_type, field.nullable)


def _as_tables(
    rows: pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch],
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The schema and the rows as small tables, whatever form they came in."""
    if isinstance(rows, pa.Table):
        return rows.schema, iter([rows])
    if isinstance(rows, pa.RecordBatch):
        return rows.schema, iter([_as_table(rows)])
    if isinstance(rows, pa.RecordBatchReader):
        return rows.schema, map(_as_table, rows)
    try:
        batches = iter(rows)
    except TypeError:
        batches = iter([])
    first = next(batches, None)
    if not isinstance(first, pa.RecordBatch | pa.Table):
        raise InvalidArgument(
            f"rows must be an Arrow table, or record batches of which there is at least one to "
            f"tell the columns, got {type(rows if first is None else first).__name__}"
        )
    return first.schema, map(_as_table, chain([first], batches))


def _as_table(batch: pa.RecordBatch | pa.Table) -> pa.Table:
    return batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
