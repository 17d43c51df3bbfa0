"""Options of the data source: strings from Spark, checked before any work begins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keygroups.assignment import KeyGroupRange, check_parallelism, default_max_parallelism
from keygroups.errors import InvalidArgument
from keygroups.hashing import check_scheme
from keygroups.snapshot.backend import get_backend
from keygroups.snapshot.writer import DEFAULT_STATE, DEFAULT_UID

READ_OPTIONS = ("path", "parallelism", "uid", "state", "columns", "keyGroups", "pushdown")
WRITE_OPTIONS = (
    "path",
    "key",
    "maxParallelism",
    "parallelism",
    "backend",
    "scheme",
    "uid",
    "state",
)

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class ReadOptions:
    """What to read.

    Attributes:
        path: The directory of the snapshot.
        parallelism: How many partitions; as many as the snapshot has ranges if ``None``.
        uid: The operator uid; the only operator if ``None``.
        state: The state's name; the only state if ``None``.
        columns: The columns to read; key, value and ``key_group`` if ``None``.
        key_groups: Only rows of these; of all if ``None``.
        pushdown: Whether filters of the query are used to skip segments.
    """

    path: str
    parallelism: int | None
    uid: str | None
    state: str | None
    columns: tuple[str, ...] | None
    key_groups: tuple[KeyGroupRange, ...] | None
    pushdown: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Parses the options of a read.

        Raises:
            InvalidArgument: For an unknown or malformed option; the message names it.
        """
        given = _known(options, READ_OPTIONS, "read")
        columns = given.get("columns")
        return cls(
            path=_path(given),
            parallelism=_integer(given, "parallelism"),
            uid=given.get("uid"),
            state=given.get("state"),
            columns=None if columns is None else _names("columns", columns),
            key_groups=_key_groups(given),
            pushdown=_flag(given, "pushdown"),
        )


@dataclass(frozen=True)
class WriteOptions:
    """What to write.

    Attributes:
        path: The directory of the snapshot.
        key: The key columns.
        max_parallelism: How many key groups.
        parallelism: How many ranges.
        backend: The name of the encoding.
        scheme: How keys are hashed.
        uid: The operator uid.
        state: The name of the state.
    """

    path: str
    key: tuple[str, ...]
    max_parallelism: int
    parallelism: int
    backend: str
    scheme: str
    uid: str
    state: str

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Parses the options of a write.

        Raises:
            InvalidArgument: For an unknown, missing or malformed option; the message names it.
        """
        given = _known(options, WRITE_OPTIONS, "write")
        if "key" not in given:
            raise InvalidArgument("option 'key' is missing: name the key columns, as in 'a,b'")
        parallelism = _integer(given, "parallelism")
        parallelism = 1 if parallelism is None else parallelism
        wanted = _integer(given, "maxParallelism")
        try:
            check_parallelism(
                default_max_parallelism(parallelism) if wanted is None else wanted, parallelism
            )
        except InvalidArgument as error:
            raise InvalidArgument(f"options 'maxParallelism', 'parallelism': {error}") from None
        scheme = given.get("scheme", "flink")
        check_scheme(scheme)
        backend = given.get("backend", "parquet")
        get_backend(backend)
        return cls(
            path=_path(given),
            key=_names("key", given["key"]),
            max_parallelism=default_max_parallelism(parallelism) if wanted is None else wanted,
            parallelism=parallelism,
            backend=backend,
            scheme=scheme,
            uid=given.get("uid", DEFAULT_UID),
            state=given.get("state", DEFAULT_STATE),
        )


def local_path(path: str) -> str:
    """Returns a path of Spark's as one of the operating system's.

    Raises:
        InvalidArgument: If it is a URI of another file system than the local one.
    """
    scheme, separator, rest = path.partition(":")
    if not separator or "/" in scheme:
        return path
    if scheme.lower() != "file":
        raise InvalidArgument(
            f"option 'path': {path!r} is not on a local or mounted file system, the only kind "
            f"that snapshots are kept on so far"
        )
    return "/" + rest.lstrip("/") if rest.startswith("/") else rest


def _known(options: Mapping[str, str], names: tuple[str, ...], verb: str) -> dict[str, str]:
    """The options by our spelling of their names, whatever their case."""
    by_lower = {name.lower(): name for name in names}
    unknown = sorted(name for name in options if name.lower() not in by_lower)
    if unknown:
        raise InvalidArgument(
            f"unknown option {', '.join(map(repr, unknown))}; to {verb} a snapshot there are "
            f"{', '.join(names)}"
        )
    return {by_lower[name.lower()]: value for name, value in options.items()}


def _path(given: Mapping[str, str]) -> str:
    if not given.get("path"):
        raise InvalidArgument("option 'path' is missing: load(path) or save(path)")
    return local_path(given["path"])


def _integer(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    try:
        return int(given[name])
    except ValueError:
        raise InvalidArgument(f"option {name!r} is {given[name]!r}, not an integer") from None


def _flag(given: Mapping[str, str], name: str) -> bool:
    value = given.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidArgument(f"option {name!r} is {given[name]!r}, neither 'true' nor 'false'")
    return value == "true"


def _key_groups(given: Mapping[str, str]) -> tuple[KeyGroupRange, ...] | None:
    """Numbers and ranges joined by commas: ``0-15,77``."""
    text = given.get("keyGroups")
    if text is None:
        return None
    ranges = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None or not (wanted := KeyGroupRange(int(found[1]), int(found[2] or found[1]))):
            raise InvalidArgument(
                f"option 'keyGroups' is {text!r:.200}, not key groups or ranges as in '0-15,77'"
            )
        ranges.append(wanted)
    return tuple(ranges)


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise InvalidArgument(f"option {option!r} is {text!r}, not names joined by commas")
    return names
