"""The commit protocol: data under names never used before, then one manifest, or nothing.

:class:`Attempt` builds every path of a snapshot; nobody else joins strings into one.
"""

from __future__ import annotations

import contextlib
import datetime
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from keygroups.assignment import KeyGroupRange
from keygroups.errors import (
    IncompatibleSnapshot,
    InvalidArgument,
    KeyGroupsError,
    SnapshotCorrupted,
    SnapshotExists,
    SnapshotNotFound,
    StorageUnavailable,
)
from keygroups.snapshot.digest import digest_bytes
from keygroups.snapshot.index import SegmentIndex, write_index
from keygroups.snapshot.manifest import (
    MANIFEST_SIZE_LIMIT_BYTES,
    Manifest,
    Operator,
    StoredFile,
)
from keygroups.snapshot.storage import LocalStorage

MANIFEST_PATH = "manifest.json"
DATA_FOLDER = "data"


def read_manifest(storage: LocalStorage) -> Manifest:
    """Reads the manifest of a snapshot.

    Raises:
        SnapshotNotFound: If there is none.
        IncompatibleSnapshot: If it is of another format, version or feature set.
        SnapshotCorrupted: If it was altered.
    """
    if not storage.exists(MANIFEST_PATH):
        raise SnapshotNotFound(
            f"no snapshot at {storage.root}: it has no {MANIFEST_PATH}. Check the path; a "
            f"writer that failed leaves none"
        )
    data = storage.read(MANIFEST_PATH, MANIFEST_SIZE_LIMIT_BYTES)
    return Manifest.from_bytes(data, str(storage.root / MANIFEST_PATH))


def read_verified(storage: LocalStorage, file: StoredFile) -> bytes:
    """Returns the bytes of a file that the manifest names, if they are what it says.

    Raises:
        SnapshotCorrupted: Otherwise.
    """
    size_bytes = storage.size_bytes(file.path)
    if size_bytes != file.size_bytes:
        raise wrong_size(storage, file, size_bytes)
    data = storage.read(file.path, file.size_bytes)
    check_digest(storage, file, digest_bytes(data))
    return data


def wrong_size(storage: LocalStorage, file: StoredFile, size_bytes: int) -> SnapshotCorrupted:
    """Returns the error for a file that has not the size that the manifest says."""
    return SnapshotCorrupted(
        f"{storage.root / file.path} has {size_bytes} bytes, the manifest says "
        f"{file.size_bytes}. The file was truncated or replaced; restore it from a copy"
    )


def check_digest(
    storage: LocalStorage, file: StoredFile, digest: str, stated: str | None = None
) -> None:
    """Checks the digest of a file's bytes, or of those of its footer, against the manifest.

    Raises:
        SnapshotCorrupted: If they differ.
    """
    stated = stated or file.digest
    if digest != stated:
        raise SnapshotCorrupted(
            f"{storage.root / file.path} has digest {digest}, the manifest says {stated}. "
            f"The file changed after it was written; restore it from a copy"
        )


@dataclass(frozen=True)
class Attempt:
    """One try to write a snapshot; its files are invisible until :meth:`commit`.

    As a context manager it deletes them again if the block fails.

    Attributes:
        storage: The root of the snapshot.
        attempt_id: Names the folder of all its data files; never used twice.
        overwrite: Whether a snapshot that is there already is replaced.
    """

    storage: LocalStorage
    attempt_id: str
    overwrite: bool = False

    @classmethod
    def begin(cls, storage: LocalStorage, *, overwrite: bool = False) -> Attempt:
        """Begins an attempt.

        Raises:
            SnapshotExists: If a snapshot is there and is not to be replaced.
        """
        if not overwrite and storage.exists(MANIFEST_PATH):
            raise SnapshotExists(
                f"a snapshot is already committed at {storage.root}; it was left as it is. "
                f"Choose another path or overwrite it on purpose"
            )
        return cls(storage, uuid.uuid4().hex, overwrite)

    @property
    def folder(self) -> str:
        """The folder of all files of this attempt."""
        return f"{DATA_FOLDER}/{self.attempt_id}"

    @property
    def spill_folder(self) -> Path:
        """Where rows may wait on disk while they are sorted."""
        return self.storage.root / self.folder / f"spill-{uuid.uuid4().hex[:8]}"

    @property
    def marker_path(self) -> str:
        """A file that tells writers in other processes that the attempt goes on."""
        return f"{self.folder}/open"

    def new_run_folder(self, key_groups: KeyGroupRange) -> str:
        """Returns a folder for one run, distinct even among retries of one task."""
        return f"{self.folder}/{key_groups.start:05d}-{key_groups.end:05d}-{uuid.uuid4().hex[:8]}"

    def segment_path(self, run_folder: str, number: int, suffix: str) -> str:
        """Returns the path of segment ``number`` of a run."""
        return f"{run_folder}/{number:06d}.{suffix}"

    def commit(
        self, operators: Sequence[Operator], index: Sequence[Sequence[SegmentIndex]]
    ) -> Manifest:
        """Publishes the snapshot, atomically.

        Args:
            operators: What it holds.
            index: For each run in manifest order, the index of its segments.

        Raises:
            SnapshotExists: If another writer was first.
        """
        data = write_index(index)
        path = f"{self.folder}/index.arrow"
        with self.storage.create(path) as file:
            file.write(data)
            digest = file.close_durably()
        manifest = Manifest(
            snapshot_id=uuid.uuid4().hex,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            operators=tuple(operators),
            index=StoredFile(path, len(data), digest),
            index_rows=sum(len(segment.key_group) for run in index for segment in run),
        )
        text = manifest.to_bytes()
        if len(text) > MANIFEST_SIZE_LIMIT_BYTES:
            raise InvalidArgument(
                f"the manifest would have {len(text)} bytes, the limit is "
                f"{MANIFEST_SIZE_LIMIT_BYTES}; write fewer ranges or larger segments"
            )
        replaced = self._replaced_folders()
        self.storage.commit(MANIFEST_PATH, text, replace=self.overwrite)
        for folder in replaced:
            with contextlib.suppress(StorageUnavailable):  # it is committed; gc finds the rest
                self.storage.delete_tree(folder)
        return manifest

    def abort(self) -> None:
        """Deletes all files of this attempt."""
        self.storage.delete_tree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            with contextlib.suppress(KeyGroupsError):  # the first error is the one to tell
                if not self._is_published():
                    self.abort()

    def _is_published(self) -> bool:
        """Whether the manifest that is there is of this attempt: an error may come after it."""
        if not self.storage.exists(MANIFEST_PATH):
            return False
        text = self.storage.read(MANIFEST_PATH, MANIFEST_SIZE_LIMIT_BYTES)
        return self.attempt_id.encode() in text

    def _replaced_folders(self) -> set[str]:
        """Folders of the snapshot that this commit replaces, if it can be read."""
        if not self.overwrite:
            return set()
        try:
            files = read_manifest(self.storage).files
        except (SnapshotNotFound, SnapshotCorrupted, IncompatibleSnapshot):
            return set()
        folders = (file.path.split("/")[:2] for file in files if file.path.count("/") > 1)
        return {"/".join(parts) for parts in folders if parts[0] == DATA_FOLDER}
