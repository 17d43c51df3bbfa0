"""The manifest: what a snapshot holds, as frozen values and as the JSON file that commits it.

Parsing trusts nothing: sizes, counts, paths, ranges and the digest of the text itself are
checked before anything else is read. FORMAT.md, "Manifest", has the field tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import pyarrow as pa

from keygroups.assignment import KeyGroupRange, check_max_parallelism, ranges_of_starts
from keygroups.errors import IncompatibleSnapshot, InvalidArgument, SnapshotCorrupted
from keygroups.hashing import SCHEMES, check_key_type, check_scheme
from keygroups.snapshot.digest import digest_bytes
from keygroups.snapshot.types import field_from_json, field_to_json

FORMAT_NAME = "keygroups-snapshot"
FORMAT_VERSION = 1
MANIFEST_SIZE_LIMIT_BYTES = 256 << 20
NAME_LENGTH_LIMIT = 1024
PATH_LENGTH_LIMIT = 1024
COUNT_LIMIT = 1 << 62
RESERVED_COLUMNS = ("key_group", "key_hash", "op")

_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_TAIL = re.compile(rb'  "digest": "([0-9a-f]{32})"\n}\n')
_TAIL_SIZE_BYTES = len('  "digest": ""\n}\n') + 32

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the snapshot.

    Attributes:
        path: Relative to the root of the snapshot.
        size_bytes: Its exact size.
        digest: XXH3-128 of its bytes, 32 hexadecimal digits.
    """

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Footer:
    """The end of a segment that no checksum inside it covers.

    Attributes:
        size_bytes: How many bytes, at least 1.
        digest: XXH3-128 of them.
    """

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a run, of whole key groups unless one group fills several segments.

    Attributes:
        file: Where its bytes are.
        rows: How many rows it holds.
        footer: What a reader of a part of it must check first, if anything.
    """

    file: StoredFile
    rows: int
    footer: Footer | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Sorted rows that one writer wrote for one range in one epoch.

    Attributes:
        kind: ``"base"``: live rows. (``"delta"``, one epoch's changes, is not written yet.)
        epoch: The epoch that wrote it, 0 for a savepoint of a batch job.
        key_groups: The range that it was written for; every row lies in it.
        segments: In order of key group, key hash and key.
    """

    kind: str
    epoch: int
    key_groups: KeyGroupRange
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """How many rows the run holds."""
        return sum(segment.rows for segment in self.segments)


@dataclass(frozen=True, slots=True)
class State:
    """A named state of an operator: its descriptor and where its rows are.

    Attributes:
        name: The name of the state descriptor.
        kind: ``"value"``: one row a key.
        backend: Which encoding its segments have.
        fields: The value columns.
        runs: Its rows, in any order of ranges; ranges of runs may overlap.
    """

    name: str
    kind: str
    backend: str
    fields: tuple[pa.Field, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's keyed state and the cut of its key groups.

    Attributes:
        uid: The operator uid.
        max_parallelism: How many key groups there are, 1 to 32768.
        scheme: How keys are hashed to key groups.
        ranges: The cut: one range a subtask, tiling ``[0, max_parallelism - 1]``.
        key: The key columns; several of them are hashed as a tuple.
        epoch: The last epoch in it.
        watermark_ms: Event time in ms since 1970 that it has seen, or ``None``.
        states: Its states, by distinct names.
    """

    uid: str
    max_parallelism: int
    scheme: str
    ranges: tuple[KeyGroupRange, ...]
    key: tuple[pa.Field, ...]
    epoch: int
    watermark_ms: int | None
    states: tuple[State, ...]

    @property
    def key_type(self) -> pa.DataType:
        """The type that is hashed: that of the one key column, or a struct of several."""
        return self.key[0].type if len(self.key) == 1 else pa.struct(self.key)

    @property
    def parallelism(self) -> int:
        """How many ranges the cut has."""
        return len(self.ranges)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot holds.

    Attributes:
        snapshot_id: 32 hexadecimal digits, new for each snapshot.
        created_at: When it was committed: ISO 8601, UTC.
        operators: By distinct uids.
        index: The file with rows, bytes and digest of each key group in each segment.
        index_rows: How many rows that index has.
    """

    snapshot_id: str
    created_at: str
    operators: tuple[Operator, ...]
    index: StoredFile
    index_rows: int

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs in manifest order: the index numbers them so."""
        return tuple(
            run for operator in self.operators for state in operator.states for run in state.runs
        )

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Every file that the manifest names."""
        segments = (segment.file for run in self.runs for segment in run.segments)
        return (self.index, *segments)

    def to_bytes(self) -> bytes:
        """Returns the text of ``manifest.json``; its last member is the digest of the rest."""
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "must_understand": [],
            "snapshot_id": self.snapshot_id,
            "created_at": self.created_at,
            "operators": [_operator_to_json(operator) for operator in self.operators],
            "index": {**_file_to_json(self.index), "rows": self.index_rows},
        }
        covered = json.dumps(body, indent=2).removesuffix("\n}").encode() + b",\n"
        return covered + f'  "digest": "{digest_bytes(covered)}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Parses ``manifest.json``.

        Args:
            data: The whole file.
            where: Its path, for messages.

        Raises:
            IncompatibleSnapshot: If it is of another format, version or feature set.
            SnapshotCorrupted: If it was altered, or contradicts itself.
        """
        try:
            return _parse(data)
        except IncompatibleSnapshot as error:
            raise IncompatibleSnapshot(f"{where}: {error}") from None
        except (SnapshotCorrupted, InvalidArgument) as error:
            raise SnapshotCorrupted(f"{where}: {error}") from None


def _parse(data: bytes) -> Manifest:
    try:
        root = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotCorrupted(
            f"not valid JSON ({error}); the file was damaged, restore it from a copy"
        ) from None
    if not isinstance(root, dict) or root.get("format") != FORMAT_NAME:
        raise IncompatibleSnapshot(f'this is not the manifest of a "{FORMAT_NAME}"')
    if type(root.get("version")) is not int or root["version"] != FORMAT_VERSION:
        raise IncompatibleSnapshot(
            f"format version {root.get('version')!r} is not {FORMAT_VERSION}, the one that this "
            f"keygroups reads; use the release that wrote it, or a newer one"
        )
    if unknown := _member(root, "must_understand", list):
        raise IncompatibleSnapshot(
            f"it needs features unknown to this keygroups, {unknown!r:.200}; use a newer one"
        )
    _check_digest(data)
    index = _member(root, "index", dict)
    manifest = Manifest(
        snapshot_id=_text(root, "snapshot_id"),
        created_at=_text(root, "created_at"),
        operators=tuple(_operator_from_json(o) for o in _member(root, "operators", list)),
        index=_file_from_json(index),
        index_rows=_count(index, "rows"),
    )
    if not manifest.operators:
        raise SnapshotCorrupted("it names no operator")
    _check_distinct("operator uid", [operator.uid for operator in manifest.operators])
    _check_distinct("file", [file.path for file in manifest.files])
    return manifest


def _check_digest(data: bytes) -> None:
    covered, tail = data[:-_TAIL_SIZE_BYTES], data[-_TAIL_SIZE_BYTES:]
    stated = _TAIL.fullmatch(tail)
    actual = digest_bytes(covered)
    if stated is None or stated[1].decode() != actual:
        raise SnapshotCorrupted(
            f"its bytes have digest {actual}, it says "
            f"{stated[1].decode() if stated else 'none'}. It was altered after it was written; "
            f"restore it from a copy"
        )


def _operator_to_json(operator: Operator) -> dict[str, Any]:
    return {
        "uid": operator.uid,
        "max_parallelism": operator.max_parallelism,
        "scheme": operator.scheme,
        "cut": [key_groups.start for key_groups in operator.ranges],
        "key": [field_to_json(field) for field in operator.key],
        "epoch": operator.epoch,
        "watermark_ms": operator.watermark_ms,
        "states": [_state_to_json(state) for state in operator.states],
    }


def _operator_from_json(json: object) -> Operator:
    fields = _object("operator", json)
    max_parallelism = check_max_parallelism(_member(fields, "max_parallelism", int))
    watermark_ms = fields.get("watermark_ms")
    if watermark_ms is not None and type(watermark_ms) is not int:
        raise SnapshotCorrupted(f"watermark_ms is {watermark_ms!r:.50}, not an integer or null")
    if (scheme := _text(fields, "scheme")) not in SCHEMES:
        raise IncompatibleSnapshot(
            f"scheme {scheme!r:.100} is unknown; a newer keygroups may know it"
        )
    operator = Operator(
        uid=_text(fields, "uid"),
        max_parallelism=max_parallelism,
        scheme=scheme,
        ranges=tuple(ranges_of_starts(_member(fields, "cut", list), max_parallelism)),
        key=tuple(field_from_json(field) for field in _member(fields, "key", list)),
        epoch=_count(fields, "epoch"),
        watermark_ms=watermark_ms,
        states=tuple(
            _state_from_json(state, max_parallelism) for state in _member(fields, "states", list)
        ),
    )
    check_operator(operator)
    return operator


def check_operator(operator: Operator) -> None:
    """Checks that names are distinct and the key can be hashed by the scheme.

    Raises:
        InvalidArgument: Otherwise.
    """
    check_scheme(operator.scheme)
    for what, name in [("uid", operator.uid), *(("state name", s.name) for s in operator.states)]:
        _check_name(what, name)
    if not operator.key:
        raise InvalidArgument(f"operator {operator.uid!r} has no key column")
    check_key_type(operator.key_type, operator.scheme)
    _check_distinct("state", [state.name for state in operator.states])
    for state in operator.states:
        columns = [field.name for field in (*operator.key, *state.fields)]
        _check_distinct("column", columns)
        for name in columns:
            _check_name("name of a column", name)
            if name in RESERVED_COLUMNS:
                raise InvalidArgument(
                    f"column {name!r} has a name that every snapshot uses itself; rename or drop it"
                )


def _state_to_json(state: State) -> dict[str, Any]:
    return {
        "name": state.name,
        "kind": state.kind,
        "backend": state.backend,
        "fields": [field_to_json(field) for field in state.fields],
        "runs": [run_to_json(run) for run in state.runs],
    }


def _state_from_json(json: object, max_parallelism: int) -> State:
    fields = _object("state", json)
    if (kind := _text(fields, "kind")) != "value":
        raise IncompatibleSnapshot(f"state kind {kind!r} is unknown; a newer keygroups may know it")
    return State(
        name=_text(fields, "name"),
        kind=kind,
        backend=_text(fields, "backend"),
        fields=tuple(field_from_json(field) for field in _member(fields, "fields", list)),
        runs=tuple(run_from_json(run, max_parallelism) for run in _member(fields, "runs", list)),
    )


def run_to_json(run: Run) -> dict[str, Any]:
    """Returns a run as it stands in a manifest."""
    return {
        "kind": run.kind,
        "epoch": run.epoch,
        "key_groups": [run.key_groups.start, run.key_groups.end],
        "segments": [_segment_to_json(segment) for segment in run.segments],
    }


def run_from_json(json: object, max_parallelism: int) -> Run:
    """Returns the run that :func:`run_to_json` wrote.

    Raises:
        SnapshotCorrupted: If it is malformed.
        IncompatibleSnapshot: If it is of a kind that this version does not know.
    """
    fields = _object("run", json)
    if (kind := _text(fields, "kind")) != "base":
        raise IncompatibleSnapshot(f"run kind {kind!r} is unknown; a newer keygroups may know it")
    bounds = _member(fields, "key_groups", list)
    if len(bounds) != 2 or not 0 <= _integer(bounds[0]) <= _integer(bounds[1]) < max_parallelism:
        raise SnapshotCorrupted(
            f"a run has key groups {bounds!r:.100}, not [start, end] within "
            f"[0, {max_parallelism - 1}]"
        )
    segments = []
    for entry in _member(fields, "segments", list):
        segment = _object("segment", entry)
        segments.append(_segment_from_json(segment))
    return Run(
        kind=kind,
        epoch=_count(fields, "epoch"),
        key_groups=KeyGroupRange(*bounds),
        segments=tuple(segments),
    )


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    footer = segment.footer and {"footer": asdict(segment.footer)}
    return {**_file_to_json(segment.file), "rows": segment.rows, **(footer or {})}


def _segment_from_json(fields: Mapping[str, Any]) -> Segment:
    file, footer = _file_from_json(fields), None
    if "footer" in fields:
        parts = _member(fields, "footer", dict)
        footer = Footer(_count(parts, "size_bytes"), _digest(parts))
        if not 1 <= footer.size_bytes <= file.size_bytes:
            raise SnapshotCorrupted(
                f"the footer of {file.path} has {footer.size_bytes} of {file.size_bytes} bytes"
            )
    return Segment(file, _count(fields, "rows"), footer)


def _digest(fields: Mapping[str, Any]) -> str:
    digest = _text(fields, "digest")
    if not _DIGEST.fullmatch(digest):
        raise SnapshotCorrupted(f"{digest!r:.50} is not a digest of 32 hexadecimal digits")
    return digest


def _file_to_json(file: StoredFile) -> dict[str, Any]:
    return {"path": file.path, "size_bytes": file.size_bytes, "digest": file.digest}


def _file_from_json(fields: Mapping[str, Any]) -> StoredFile:
    path, digest = _text(fields, "path"), _digest(fields)
    if len(path) > PATH_LENGTH_LIMIT or not _PATH.fullmatch(path):
        raise SnapshotCorrupted(
            f"{path!r:.200} is not the relative path of a file inside the snapshot"
        )
    return StoredFile(path, _count(fields, "size_bytes"), digest)


def _object(what: str, json: object) -> dict[str, Any]:
    if not isinstance(json, dict):
        raise SnapshotCorrupted(f"{json!r:.100} does not describe a {what}")
    return json


def _member(fields: Mapping[str, Any], name: str, expected: type[_T]) -> _T:
    value = fields.get(name)
    if type(value) is not expected:  # bool is no int here
        raise SnapshotCorrupted(f'"{name}" is {value!r:.100}, expected {expected.__name__}')
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = _member(fields, name, str)
    _check_name(f'"{name}"', value)
    return value


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str):
        raise InvalidArgument(f"the {what} is {name!r:.100}, not a string")
    if len(name) > NAME_LENGTH_LIMIT:
        raise InvalidArgument(f"the {what} has {len(name)} characters, over {NAME_LENGTH_LIMIT}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"the {what} {name!r:.100} is not valid Unicode: {error}"
            ) from None


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = _member(fields, name, int)
    if not 0 <= value <= COUNT_LIMIT:
        raise SnapshotCorrupted(f'"{name}" is {value}, not within [0, 2^62]')
    return value


def _integer(value: object) -> int:
    return value if type(value) is int else -1


def _check_distinct(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"{what} {name!r:.200} is named twice")
        seen.add(name)
