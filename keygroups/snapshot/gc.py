"""Garbage: files below a snapshot that no manifest names.

A writer that died leaves its data files, and may leave a manifest that it did not publish. A
writer that is still at work looks the same, so age tells them apart: the age of an attempt is
that of the file in it that changed last, because a long attempt has old files too.
"""

from __future__ import annotations

import time
from os import PathLike

from keygroups.snapshot.commit import read_manifest
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.verify import unreferenced_files

DEFAULT_OLDER_THAN_S = 24 * 3600.0


def collect_garbage(
    path: str | PathLike[str],
    *,
    older_than_s: float = DEFAULT_OLDER_THAN_S,
    delete: bool = False,
    now_s: float | None = None,
) -> list[tuple[str, int]]:
    """Lists files that no manifest names, and deletes them if told to.

    Args:
        path: The directory of the snapshot.
        older_than_s: Leave the files of attempts in which one changed since; 0 is safe only
            while nobody writes here.
        delete: Delete what is listed, and folders left empty.
        now_s: The time, in seconds since 1970; the clock's if ``None``.

    Returns:
        Path, relative to the root, and size in bytes of each file that is (or was) garbage.

    Raises:
        SnapshotNotFound, SnapshotCorrupted, IncompatibleSnapshot: If there is no snapshot that
            tells what is garbage: nothing is deleted.
        StorageUnavailable: If the disk refuses.
    """
    snapshot = Snapshot.open(path)
    storage = snapshot.storage
    found = list(unreferenced_files(snapshot))
    # Read again after listing: what was committed meanwhile is no garbage.
    named = {file.path for file in read_manifest(storage).files}
    found = [file for file in found if file[0] not in named]

    changed_s: dict[str, float] = {}
    for file_path, _, file_changed_s in found:
        attempt = _attempt_of(file_path)
        changed_s[attempt] = max(file_changed_s, changed_s.get(attempt, file_changed_s))
    limit_s = (time.time() if now_s is None else now_s) - older_than_s
    garbage = [
        (file_path, size_bytes)
        for file_path, size_bytes, _ in found
        if changed_s[_attempt_of(file_path)] <= limit_s
    ]
    if delete:
        for file_path, _ in garbage:
            storage.delete_tree(file_path)
    return garbage


def _attempt_of(path: str) -> str:
    """The folder of all files of one attempt, or the file itself in the root."""
    return "/".join(path.split("/")[:2])
