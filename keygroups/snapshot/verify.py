"""Verifying: every byte, row and promise of a snapshot, checked against each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from os import PathLike

import numpy as np
import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.errors import (
    IncompatibleSnapshot,
    InvalidArgument,
    KeyGroupsError,
    SnapshotCorrupted,
    StorageUnavailable,
)
from keygroups.hashing import hash_keys, key_groups_of_hashes
from keygroups.snapshot.backend import RowSchema
from keygroups.snapshot.commit import DATA_FOLDER, MANIFEST_PATH, read_verified
from keygroups.snapshot.index import SegmentIndex
from keygroups.snapshot.manifest import Operator, Run, State
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.sort import snapshot_order
from keygroups.snapshot.writer import index_segment

_TEMPORARY_MANIFEST = re.compile(re.escape(MANIFEST_PATH) + r"\.[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as the snapshot promises.

    Attributes:
        path: The file, relative to the root of the snapshot.
        key_groups: The key groups that it concerns.
        message: What is wrong and what to do.
    """

    path: str
    key_groups: KeyGroupRange
    message: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of :func:`verify`.

    Attributes:
        findings: What is wrong; nothing if the snapshot is whole.
        files: How many data files were checked.
        rows: How many rows they hold by the manifest.
        size_bytes: Their size.
        unreferenced: Files that no manifest names: left by a writer that failed, or in the
            making. Harmless; ``keygroups gc`` deletes old ones.
    """

    findings: tuple[Finding, ...]
    files: int
    rows: int
    size_bytes: int
    unreferenced: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def verify(
    path: str | PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Reads a whole snapshot and checks all that can be checked.

    Of every file its size and digest; of every row its place in the order, that its key hash
    and key group are those of its key, and that no key is there twice; of every key group its
    rows, bytes and digest against the index.

    Args:
        path: The directory of the snapshot.
        progress: Called with files done and files in all.

    Returns:
        The findings; one damaged file does not end the check of the others.

    Raises:
        SnapshotNotFound: If there is no snapshot.
        SnapshotCorrupted: If the manifest or the index are damaged: then nothing can be checked.
        IncompatibleSnapshot: If a newer or another library wrote it.
    """
    snapshot = Snapshot.open(path)
    total = sum(len(run.segments) for run in snapshot.manifest.runs)
    findings: list[Finding] = []
    done = 0
    for operator in snapshot.manifest.operators:
        for state in operator.states:
            found_before = len(findings)
            for run in state.runs:
                for found in _check_run(snapshot, operator, state, run):
                    findings += found
                    done += 1
                    if progress:
                        progress(done, total)
            if len(findings) == found_before:  # else rows of this state cannot all be read
                findings += _check_overlaps(snapshot, operator, state)
    segments = [segment for run in snapshot.manifest.runs for segment in run.segments]
    return Verification(
        findings=tuple(findings),
        files=len(segments),
        rows=sum(segment.rows for segment in segments),
        size_bytes=sum(segment.file.size_bytes for segment in segments),
        unreferenced=tuple(path for path, _, _ in unreferenced_files(snapshot)),
    )


def unreferenced_files(snapshot: Snapshot) -> Iterator[tuple[str, int, float]]:
    """Yields path, size in bytes and time of last change (s) of data files no manifest names."""
    named = {file.path for file in snapshot.manifest.files}
    for path, size_bytes, changed_s in snapshot.storage.list_files():
        is_ours = path.startswith(f"{DATA_FOLDER}/") or _TEMPORARY_MANIFEST.fullmatch(path)
        if is_ours and path not in named:
            yield path, size_bytes, changed_s


def _check_run(
    snapshot: Snapshot, operator: Operator, state: State, run: Run
) -> Iterator[list[Finding]]:
    """Yields the findings of each segment."""
    schema = RowSchema(operator.key, state.fields)
    last: pa.Table | None = None
    for number, segment in enumerate(run.segments):
        index = snapshot.index(run)[number]
        try:
            last = _check_segment(snapshot, operator, state, schema, run, number, last)
            yield []
        except (StorageUnavailable, IncompatibleSnapshot):
            raise
        except KeyGroupsError as error:
            yield [Finding(segment.file.path, index.key_groups, str(error))]


def _check_segment(
    snapshot: Snapshot,
    operator: Operator,
    state: State,
    schema: RowSchema,
    run: Run,
    number: int,
    last: pa.Table | None,
) -> pa.Table:
    """Checks one segment; returns its last row, which the next must come after."""
    segment, index = run.segments[number], snapshot.index(run)[number]
    read_verified(snapshot.storage, segment.file)
    every = KeyGroupRange(0, operator.max_parallelism - 1)
    rows = snapshot.read_segment(run, number, state.backend, schema, every, schema.stored.names)
    where = snapshot.storage.root / segment.file.path
    hashes = hash_keys(schema.key_array(rows), operator.scheme)
    groups = key_groups_of_hashes(hashes, operator.max_parallelism, operator.scheme)
    for name, expected in (("key_hash", hashes.to_numpy()), ("key_group", groups)):
        wrong = np.flatnonzero(rows.column(name).to_numpy() != expected)
        if len(wrong):
            row = int(wrong[0])
            raise SnapshotCorrupted(
                f"{where}: row {row} has {name} {rows.column(name)[row]}, its key gives "
                f"{expected[row]}"
            )
    _check_index(where.as_posix(), index, index_segment(rows, schema))
    ordered = rows if last is None else pa.concat_tables([last, rows])
    if not np.array_equal(snapshot_order(ordered, schema), np.arange(len(ordered))):
        raise SnapshotCorrupted(f"{where}: rows are not in order of key group, key hash and key")
    return rows.slice(rows.num_rows - 1)


def _check_index(where: str, stated: SegmentIndex, actual: SegmentIndex) -> None:
    for field in fields(SegmentIndex):
        expected, found = getattr(stated, field.name), getattr(actual, field.name)
        if not np.array_equal(expected, found):
            place = int(np.flatnonzero(expected != found)[0])
            raise SnapshotCorrupted(
                f"{where}: key group {stated.key_group[place]} has {field.name} {found[place]}, "
                f"the index says {expected[place]}"
            )


def _check_overlaps(snapshot: Snapshot, operator: Operator, state: State) -> list[Finding]:
    """Looks for keys that are in several runs, where runs overlap."""
    try:
        snapshot.check_unique_keys(operator, state)
    except InvalidArgument as error:
        path = next(segment.file.path for run in state.runs for segment in run.segments)
        return [Finding(path, KeyGroupRange(0, operator.max_parallelism - 1), str(error))]
    return []
