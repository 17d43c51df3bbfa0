"""The index: for each key group in each segment, its rows, bytes and digest.

With it a plan knows what a rescale will read, a restore opens only the segments of its
range, and two snapshots are compared without reading a row. One Arrow IPC file a snapshot;
FORMAT.md, "Index".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.errors import SnapshotCorrupted
from keygroups.snapshot.manifest import Run

SCHEMA = pa.schema(
    [
        pa.field("run", pa.uint32(), nullable=False),
        pa.field("segment", pa.uint32(), nullable=False),
        pa.field("key_group", pa.uint16(), nullable=False),
        pa.field("rows", pa.uint64(), nullable=False),
        pa.field("size_bytes", pa.uint64(), nullable=False),
        pa.field("digest", pa.uint64(), nullable=False),
    ]
)
_COUNT_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """The key groups of one segment, ascending.

    Attributes:
        key_group: uint16, each once.
        rows: uint64, how many rows each has in this segment, at least 1.
        size_bytes: uint64, how many bytes of data (FORMAT.md, "Size").
        digest: uint64, the sum of the digests of those rows.
    """

    key_group: npt.NDArray[np.uint16]
    rows: npt.NDArray[np.uint64]
    size_bytes: npt.NDArray[np.uint64]
    digest: npt.NDArray[np.uint64]

    @property
    def key_groups(self) -> KeyGroupRange:
        """From the first to the last key group with rows."""
        return KeyGroupRange(int(self.key_group[0]), int(self.key_group[-1]))

    def within(self, key_groups: KeyGroupRange) -> SegmentIndex:
        """Returns the part that lies in ``key_groups``."""
        start = int(np.searchsorted(self.key_group, key_groups.start, side="left"))
        end = int(np.searchsorted(self.key_group, key_groups.end, side="right"))
        return SegmentIndex(*(getattr(self, field.name)[start:end] for field in fields(self)))


def write_index(runs: Sequence[Sequence[SegmentIndex]]) -> bytes:
    """Returns the index file of runs in manifest order, each its segments in order."""
    parts = [
        (run_number, segment_number, segment)
        for run_number, run in enumerate(runs)
        for segment_number, segment in enumerate(run)
    ]
    columns = [
        np.repeat(
            np.array([part[place] for part in parts], np.uint32),
            np.array([len(part[2].key_group) for part in parts], np.int64),
        )
        for place in (0, 1)
    ]
    for field in fields(SegmentIndex):
        pieces = [getattr(segment, field.name) for _, _, segment in parts]
        dtype = SCHEMA.field(field.name).type.to_pandas_dtype()
        columns.append(np.concatenate([np.zeros(0, dtype), *pieces]))
    batch = pa.record_batch([pa.array(column) for column in columns], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    result: bytes = sink.getvalue().to_pybytes()
    return result


def read_index(data: bytes, runs: Sequence[Run], row_count: int) -> list[list[SegmentIndex]]:
    """Parses an index file and checks that it fits the runs of the manifest.

    Raises:
        SnapshotCorrupted: If it does not.
    """
    columns = _columns(data, row_count)
    run, segment = columns["run"].astype(np.int64), columns["segment"].astype(np.int64)
    segment_counts = np.array([len(r.segments) for r in runs], np.int64)
    first_segments = np.concatenate(([0], np.cumsum(segment_counts)))
    if len(run) and int(run.max()) >= len(runs):
        raise SnapshotCorrupted(f"the index names run {int(run.max())} of {len(runs)}")
    if (segment >= segment_counts[run]).any():
        raise SnapshotCorrupted("the index names a segment that its run does not have")
    ordinal = first_segments[run] + segment
    if (np.diff(ordinal) < 0).any():
        raise SnapshotCorrupted("the index is not in order of runs and segments")
    borders = np.searchsorted(ordinal, np.arange(int(first_segments[-1]) + 1))
    result = []
    for number, r in enumerate(runs):
        at = int(first_segments[number])
        pieces = []
        for place in range(len(r.segments)):
            part = slice(int(borders[at + place]), int(borders[at + place + 1]))
            pieces.append(SegmentIndex(*(columns[f.name][part] for f in fields(SegmentIndex))))
        _check_run(number, r, pieces)
        result.append(pieces)
    return result


def _columns(data: bytes, row_count: int) -> dict[str, npt.NDArray[np.unsignedinteger]]:
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as reader:
            if not reader.schema.equals(SCHEMA):
                raise SnapshotCorrupted(f"the index has the schema {reader.schema!s:.300}")
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SnapshotCorrupted(f"the index is not a readable Arrow file: {error}") from error
    if table.num_rows != row_count:
        raise SnapshotCorrupted(
            f"the index has {table.num_rows} rows, the manifest says {row_count}"
        )
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _check_run(number: int, run: Run, segments: Sequence[SegmentIndex]) -> None:
    last = -1
    for place, (segment, index) in enumerate(zip(run.segments, segments, strict=True)):
        where = f"index of run {number}, segment {place} ({segment.file.path})"
        groups = index.key_group.astype(np.int64)
        if len(groups) == 0 or index.rows.min() == 0:
            raise SnapshotCorrupted(f"{where}: a segment or key group without rows")
        if max(index.rows.max(), index.size_bytes.max()) > _COUNT_LIMIT:
            raise SnapshotCorrupted(f"{where}: a count above 2^62")
        if (np.diff(groups) <= 0).any() or groups[0] < last:
            raise SnapshotCorrupted(f"{where}: key groups are not in ascending order")
        if groups[0] < run.key_groups.start or groups[-1] > run.key_groups.end:
            raise SnapshotCorrupted(
                f"{where}: key groups {groups[0]} to {groups[-1]} are not within the run's "
                f"{run.key_groups}"
            )
        if sum(index.rows.tolist()) != segment.rows:
            raise SnapshotCorrupted(
                f"{where}: key groups have {sum(index.rows.tolist())} rows, the segment "
                f"{segment.rows}"
            )
        last = int(groups[-1])
