"""Reading: a committed snapshot, and the rows of any range of it in snapshot order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.assignment import KeyGroupRange
from keygroups.errors import IncompatibleSnapshot, InvalidArgument, SnapshotCorrupted
from keygroups.hashing import hash_keys, key_groups_of_hashes
from keygroups.keys import encode_keys
from keygroups.snapshot.backend import RowSchema, backend_of_snapshot
from keygroups.snapshot.commit import check_digest, read_manifest, read_verified, wrong_size
from keygroups.snapshot.digest import digest_bytes
from keygroups.snapshot.index import SegmentIndex, read_index
from keygroups.snapshot.manifest import Manifest, Operator, Run, Segment, State
from keygroups.snapshot.sort import sort_rows
from keygroups.snapshot.storage import (
    LocalStorage,
    Observer,
    ReadableFile,
    VerifiedFile,
    ignore,
)

SMALL_SEGMENT_BYTES = 64 << 10  # one read of a whole file is cheaper than several of its parts
MERGE_WINDOW_BYTES = 32 << 20


class Snapshot:
    """A committed snapshot, opened for reading. It is immutable; open as many as you like.

    Attributes:
        storage: Where it lies.
        manifest: What it holds.
    """

    def __init__(
        self, storage: LocalStorage, manifest: Manifest, index: list[list[SegmentIndex]]
    ) -> None:
        self.storage = storage
        self.manifest = manifest
        self._index = dict(zip(map(id, manifest.runs), index, strict=True))

    @classmethod
    def open(cls, path: str | PathLike[str], *, observer: Observer = ignore) -> Snapshot:
        """Opens the snapshot at ``path``; reads its manifest and index, no rows.

        Args:
            path: The directory of the snapshot.
            observer: Called as ``observer(operation, path, size_bytes)`` before each access.

        Raises:
            SnapshotNotFound: If there is none.
            SnapshotCorrupted: If manifest or index are damaged.
            IncompatibleSnapshot: If a newer or another library wrote it.
            StorageUnavailable: If the disk refuses.
        """
        storage = LocalStorage(path, observer)
        while True:
            manifest = read_manifest(storage)
            try:
                data = read_verified(storage, manifest.index)
                index = read_index(data, manifest.runs, manifest.index_rows)
                return cls(storage, manifest, index)
            except SnapshotCorrupted as error:
                if read_manifest(storage).snapshot_id == manifest.snapshot_id:
                    where = storage.root / manifest.index.path
                    raise SnapshotCorrupted(f"{where}: {error}") from None
                # It was overwritten in between: what is there now is another snapshot.

    def __repr__(self) -> str:
        operators = ", ".join(
            f"{o.uid}: {o.parallelism} of {o.max_parallelism}" for o in self.manifest.operators
        )
        return f"<Snapshot {self.storage.root} ({operators})>"

    def operator(self, uid: str | None = None) -> Operator:
        """Returns the operator of that uid, or the only one.

        Raises:
            InvalidArgument: If there is none, or several and no uid was given.
        """
        found = [o for o in self.manifest.operators if uid is None or o.uid == uid]
        if len(found) != 1:
            uids = ", ".join(repr(o.uid) for o in self.manifest.operators)
            raise InvalidArgument(f"name one operator uid of {uids}, not {uid!r}")
        return found[0]

    def state(self, name: str | None = None, uid: str | None = None) -> State:
        """Returns the state of that name, or the only one, of an operator.

        Raises:
            InvalidArgument: If there is none, or several and no name was given.
        """
        operator = self.operator(uid)
        found = [s for s in operator.states if name is None or s.name == name]
        if len(found) != 1:
            names = ", ".join(repr(s.name) for s in operator.states)
            raise InvalidArgument(
                f"name one state of {names} in operator {operator.uid!r}, not {name!r}"
            )
        return found[0]

    @property
    def ranges(self) -> list[KeyGroupRange]:
        """The cut of the only operator: range ``i`` is subtask ``i``'s."""
        return list(self.operator().ranges)

    @property
    def max_parallelism(self) -> int:
        """The max parallelism of the only operator."""
        return self.operator().max_parallelism

    @property
    def parallelism(self) -> int:
        """The parallelism of the only operator."""
        return self.operator().parallelism

    def schema(self, state: str | None = None, uid: str | None = None) -> RowSchema:
        """Returns the key and value columns of a state."""
        return RowSchema(self.operator(uid).key, self.state(state, uid).fields)

    def index(self, run: Run) -> list[SegmentIndex]:
        """Returns the index of each segment of one of the manifest's runs."""
        return self._index[id(run)]

    def key_group_sizes(self, state: str | None = None, uid: str | None = None) -> pa.Table:
        """Returns rows, bytes and digest of every key group, without reading a row.

        Args:
            state: Only this state; all states of the operator if ``None``.
            uid: The operator uid; the only operator if ``None``.

        Returns:
            One row for each of the ``max_parallelism`` key groups: ``key_group`` uint16, ``rows``
            int64, ``size_bytes`` int64 (FORMAT.md, "Size"), ``digest`` uint64.
        """
        operator = self.operator(uid)
        states = operator.states if state is None else (self.state(state, uid),)
        totals = {
            name: np.zeros(operator.max_parallelism, dtype)
            for name, dtype in (("rows", "i8"), ("size_bytes", "i8"), ("digest", "u8"))
        }
        for segment in (i for s in states for run in s.runs for i in self.index(run)):
            for name, total in totals.items():
                total[segment.key_group] += getattr(segment, name).astype(total.dtype)
        key_group = np.arange(operator.max_parallelism, dtype=np.uint16)
        return pa.table({"key_group": key_group, **totals})

    def to_batches(
        self,
        range: KeyGroupRange | None = None,
        state: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        uid: str | None = None,
        keys: pa.Array | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields rows in snapshot order: by key group, key hash, key.

        Opens only the segments that hold key groups of the range; memory is bounded by a few
        segments.

        Args:
            range: The key groups to read; all of them if ``None``.
            state: The state's name; the only state if ``None``.
            columns: The columns to read, in this order; key and value columns if ``None``.
                ``"key_group"`` (uint16) and ``"key_hash"`` (int32) can be named too.
            uid: The operator uid; the only operator if ``None``.
            keys: Only rows with one of these keys (an array of the key's type; for a composite
                key, of structs); reads only segments that can hold them.

        Raises:
            InvalidArgument: If a name or the range is not in the snapshot.
            SnapshotCorrupted: If bytes that are read are damaged.
        """
        operator, found = self.operator(uid), self.state(state, uid)
        schema = RowSchema(operator.key, found.fields)
        key_groups = KeyGroupRange(0, operator.max_parallelism - 1) if range is None else range
        if key_groups and key_groups.end >= operator.max_parallelism:
            raise InvalidArgument(
                f"{key_groups} is not within [0, {operator.max_parallelism - 1}], the key groups "
                f"of operator {operator.uid!r}"
            )
        names = list(schema.user.names if columns is None else columns)
        for name in names:
            if name not in schema.stored.names:
                raise InvalidArgument(f"no column {name!r} among {', '.join(schema.stored.names)}")
        if keys is not None:
            return self._lookup(operator, found, key_groups, names, keys)
        tables = self.read_runs(found.runs, found.backend, schema, key_groups, names)
        return (batch for table in tables for batch in table.to_batches())

    def to_table(
        self,
        range: KeyGroupRange | None = None,
        state: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        uid: str | None = None,
        keys: pa.Array | None = None,
    ) -> pa.Table:
        """Returns what :meth:`to_batches` yields as one table."""
        batches = self.to_batches(range, state, columns, uid=uid, keys=keys)
        stored = self.schema(state, uid).stored
        names = self.schema(state, uid).user.names if columns is None else columns
        return pa.Table.from_batches(batches, pa.schema([stored.field(name) for name in names]))

    def read_runs(
        self,
        runs: Sequence[Run],
        backend: str,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> Iterator[pa.Table]:
        """Yields the rows of runs in snapshot order, merged where runs overlap."""
        overlapping = [run for run in runs if run.key_groups.intersection(key_groups)]
        for chain in merge_chains(overlapping):
            if len(chain) == 1:
                yield from self._read_run(chain[0], backend, schema, key_groups, columns)
            else:
                yield from self._merge(chain, backend, schema, key_groups, columns)

    def check_unique_keys(self, operator: Operator, state: State) -> None:
        """Checks that no key is in two runs; a run has each key once.

        Only runs that overlap are read, and of them only the keys.

        Raises:
            InvalidArgument: If a key is there twice; the message names it.
            SnapshotCorrupted: If bytes that are read are damaged.
        """
        schema = RowSchema(operator.key, state.fields)
        every = KeyGroupRange(0, operator.max_parallelism - 1)
        names = [field.name for field in schema.key]
        for chain in merge_chains(state.runs):
            if len(chain) > 1:
                for _ in self._merge(chain, state.backend, schema, every, names):
                    pass

    def read_segment(
        self,
        run: Run,
        number: int,
        backend: str,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> pa.Table:
        """Returns the rows of one segment that lie in ``key_groups``, checked against the index.

        A segment that is read whole is checked by its digest; of one that is read in part, its
        footer by the manifest, and the pages or blocks that are read by their checksums.
        """
        segment, index = run.segments[number], self.index(run)[number]
        expected = index.within(key_groups)
        wanted = list(dict.fromkeys(("key_group", *columns)))
        is_whole = segment.file.size_bytes <= SMALL_SEGMENT_BYTES or (
            len(expected.key_group) == len(index.key_group) and {*schema.user.names} <= {*wanted}
        )
        path = self.storage.root / segment.file.path
        try:
            store = backend_of_snapshot(backend)
        except IncompatibleSnapshot as error:
            raise IncompatibleSnapshot(f"{path}: {error}") from None
        with self._open(segment, is_whole) as file:
            try:
                rows = store.read_segment(file, schema, key_groups, wanted)
                _check_groups(rows, expected)
            except (SnapshotCorrupted, IncompatibleSnapshot) as error:
                raise type(error)(f"{path}: {error}") from error
        return rows.select(list(columns))

    def _open(self, segment: Segment, is_read_whole: bool) -> ReadableFile | VerifiedFile:
        """Opens a segment; one that is read whole is checked by its digest before."""
        if is_read_whole:
            return VerifiedFile(read_verified(self.storage, segment.file), segment.file.path)
        file = self.storage.open(segment.file.path)
        if file.size_bytes != segment.file.size_bytes:
            file.close()
            raise wrong_size(self.storage, segment.file, file.size_bytes)
        if segment.footer:
            footer = file.keep_footer(segment.footer.size_bytes)
            check_digest(self.storage, segment.file, digest_bytes(footer), segment.footer.digest)
        return file

    def _read_run(
        self,
        run: Run,
        backend: str,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> Iterator[pa.Table]:
        for number, index in enumerate(self.index(run)):
            if len(index.within(key_groups).key_group):
                yield self.read_segment(run, number, backend, schema, key_groups, columns)

    def _merge(
        self,
        runs: Sequence[Run],
        backend: str,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> Iterator[pa.Table]:
        """Sorts the rows of overlapping runs together, a window of key groups at a time."""
        key_names = [field.name for field in schema.key]
        wanted = list(dict.fromkeys(["key_group", "key_hash", *key_names, *columns]))
        for window in self._windows(runs, key_groups):
            tables = [
                table
                for run in runs
                for table in self._read_run(run, backend, schema, window, wanted)
            ]
            if tables:
                yield sort_rows(pa.concat_tables(tables), schema).select(list(columns))

    def _windows(self, runs: Sequence[Run], key_groups: KeyGroupRange) -> Iterator[KeyGroupRange]:
        """Cuts ``key_groups`` into windows of bounded size, or of one key group."""
        sizes = np.zeros(key_groups.end + 1, np.int64)
        for index in (index.within(key_groups) for run in runs for index in self.index(run)):
            sizes[index.key_group] += index.size_bytes.astype(np.int64)
        up_to = np.concatenate(([0], np.cumsum(sizes)))
        start = key_groups.start
        while start <= key_groups.end:
            limit = up_to[start] + MERGE_WINDOW_BYTES
            end = max(start + 1, int(np.searchsorted(up_to, limit, side="right")) - 1)
            yield KeyGroupRange(start, end - 1)
            start = end

    def _lookup(
        self,
        operator: Operator,
        state: State,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
        keys: pa.Array,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of some keys, from the segments whose key groups can hold them."""
        schema = RowSchema(operator.key, state.fields)
        hashes = hash_keys(keys, operator.scheme)
        if _parts(keys.type) != _parts(schema.key_type):
            raise InvalidArgument(
                f"the keys are of type {keys.type}, those of operator {operator.uid!r} of "
                f"{schema.key_type}; cast them, as another type has another hash"
            )
        groups = key_groups_of_hashes(hashes, operator.max_parallelism, operator.scheme)
        sought = encode_keys([keys])
        key_names = [field.name for field in schema.key]
        wanted = list(dict.fromkeys(["key_hash", *key_names, *columns]))
        for group in np.unique(groups).tolist():
            window = key_groups.intersection(KeyGroupRange(group, group))
            for rows in self.read_runs(state.runs, state.backend, schema, window, wanted):
                candidates = rows.filter(pc.is_in(rows.column("key_hash"), value_set=hashes))
                encoded = encode_keys([schema.key_array(candidates)])
                found = candidates.filter(pc.is_in(encoded, value_set=sought))
                yield from found.select(list(columns)).to_batches()


def merge_chains(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups runs, in order of key group, so that only runs of one chain overlap."""
    chains: list[list[Run]] = []
    end = -1
    for run in sorted(runs, key=lambda run: run.key_groups):
        if run.key_groups.start > end:
            chains.append([])
        chains[-1].append(run)
        end = max(end, run.key_groups.end)
    return chains


def _parts(data_type: pa.DataType) -> list[pa.DataType]:
    """What makes two key types alike: the types of their fields, whatever their names."""
    if pa.types.is_dictionary(data_type):
        data_type = data_type.value_type
    if not pa.types.is_struct(data_type):
        return [data_type]
    return [pa.struct([]), *(part for field in data_type for part in _parts(field.type))]


def _check_groups(rows: pa.Table, expected: SegmentIndex) -> None:
    """Checks that the rows read are of the key groups that the index says, in order."""
    group = rows.column("key_group").to_numpy()
    borders = np.flatnonzero(np.diff(group, prepend=-1)) if len(group) else np.zeros(0, np.int64)
    counts = np.diff(borders, append=len(group))
    if not np.array_equal(group[borders], expected.key_group) or not np.array_equal(
        counts.astype(np.uint64), expected.rows
    ):
        raise SnapshotCorrupted(
            f"it holds {len(group)} rows in {len(borders)} key groups, or others, where the index "
            f"says {int(expected.rows.sum())} rows in {len(expected.key_group)}"
        )
