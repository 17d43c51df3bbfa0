"""What can go wrong, in as few kinds as a caller would handle differently.

::

    KeyGroupsError
    ├── InvalidArgument (ValueError)            the caller's mistake: correct the call
    ├── SnapshotNotFound (FileNotFoundError)    no manifest at that path
    ├── SnapshotCorrupted                       bytes are not what the manifest promises
    ├── IncompatibleSnapshot                    whole, but not for this reader or this operator
    ├── SnapshotExists (FileExistsError)        somebody committed there first
    ├── StorageUnavailable (OSError)            the storage refused or failed: retry or repair it
    └── AsyncFunctionError                      a user's asynchronous function failed

Every message says what was wrong (with the numbers), where, and what to do.
"""

from __future__ import annotations


class KeyGroupsError(Exception):
    """Base class of every error that this library raises on purpose."""


class InvalidArgument(KeyGroupsError, ValueError):
    """An argument is out of bounds, of the wrong type, or contradicts another."""


class SnapshotNotFound(KeyGroupsError, FileNotFoundError):
    """There is no committed snapshot at the path."""


class SnapshotCorrupted(KeyGroupsError):
    """Bytes are missing, truncated, altered or contradict the manifest."""


class IncompatibleSnapshot(KeyGroupsError):
    """The snapshot is whole but of another version, scheme, key type or feature set."""


class SnapshotExists(KeyGroupsError, FileExistsError):
    """A snapshot is already committed at the path; nothing was changed."""


class StorageUnavailable(KeyGroupsError, OSError):
    """The storage below failed (permissions, space, a device or network error)."""


class AsyncFunctionError(KeyGroupsError):
    """A user's asynchronous function failed; the cause is chained."""
