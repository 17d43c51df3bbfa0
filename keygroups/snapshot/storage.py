"""Storage: the few operations on files that a snapshot needs, on a local disk.

Paths are relative to a root and use ``/``. Files are written once under names never used
before, made durable, and published by :meth:`LocalStorage.commit`, which creates the one
well-known file atomically and only if it is absent. Every operation reports itself to an
*observer* before it happens; so tests count what is read and fail or kill at any step.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import xxhash

from keygroups.errors import (
    KeyGroupsError,
    SnapshotCorrupted,
    SnapshotExists,
    StorageUnavailable,
)

Observer: TypeAlias = Callable[[str, str, int], None]
"""Called as ``observer(operation, path, size_bytes)`` before each operation on storage."""

_COPY_CHUNK_BYTES = 8 << 20
_FOLDER_TRIES = 16
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def ignore(operation: str, path: str, size_bytes: int) -> None:
    """The observer that does nothing."""


class LocalStorage:
    """A directory on a local disk.

    Attributes:
        root: The directory; it need not exist before the first write.
        observer: See :data:`Observer`.
    """

    def __init__(self, root: str | os.PathLike[str], observer: Observer = ignore) -> None:
        self.root = Path(os.path.abspath(root))
        self.observer = observer
        self._unsynced_folders: set[Path] = set()

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def exists(self, path: str) -> bool:
        """Tells whether there is a file at ``path``."""
        with self._step("exists", path):
            return (self.root / path).is_file()

    def size_bytes(self, path: str) -> int:
        """Returns the size of a file.

        Raises:
            SnapshotCorrupted: If it is missing or lies outside the root.
        """
        with self._step("size", path), self._existing(path):
            return self._inside(path).stat().st_size

    def read(self, path: str, size_limit_bytes: int) -> bytes:
        """Returns a whole file.

        Raises:
            SnapshotCorrupted: If it is missing, outside the root, or above the limit.
        """
        with self.open(path) as file:
            if file.size_bytes > size_limit_bytes:
                raise SnapshotCorrupted(
                    f"{self.root / path} has {file.size_bytes} bytes, the limit is "
                    f"{size_limit_bytes}"
                )
            return file.read_at(0, file.size_bytes)

    def open(self, path: str) -> ReadableFile:
        """Opens a file for reads at any place.

        Raises:
            SnapshotCorrupted: If it is missing or lies outside the root.
        """
        with self._step("open", path), self._existing(path):
            return ReadableFile(self._inside(path), path, self.observer)

    def create(self, path: str) -> WritableFile:
        """Creates a file, and the folders above it, under a name not used before."""
        with self._step("create", path):
            target = self._new_name(path)
            return WritableFile(target, path, self.observer)

    def link(self, path: str, source: LocalStorage, source_path: str) -> None:
        """Makes ``path`` another name of a file of ``source``; no data byte is read.

        Raises:
            StorageUnavailable: If the two do not lie on one file system.
        """
        with self._step("link", path):
            with source._existing(source_path):
                target = source._inside(source_path)
            os.link(target, self._new_name(path))

    def copy(self, path: str, source: LocalStorage, source_path: str) -> str:
        """Copies a file of ``source`` byte for byte and returns the digest of its bytes."""
        with source.open(source_path) as reader, self.create(path) as writer:
            for offset in range(0, reader.size_bytes, _COPY_CHUNK_BYTES):
                size_bytes = min(_COPY_CHUNK_BYTES, reader.size_bytes - offset)
                writer.write(reader.read_at(offset, size_bytes))
            return writer.close_durably()

    def commit(self, path: str, data: bytes, *, replace: bool = False) -> None:
        """Publishes ``data`` at ``path``, whole or not at all, after all that was written.

        Raises:
            SnapshotExists: If something is there already and ``replace`` is false.
        """
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with self.create(temporary) as file:
                file.write(data)
                file.close_durably()
            self.sync_folders()
            with self._step("commit", path):
                if replace:
                    os.replace(self.root / temporary, self.root / path)
                else:  # rename would replace; a hard link never does
                    os.link(self.root / temporary, self.root / path)
        except FileExistsError:
            raise SnapshotExists(
                f"a snapshot is already committed at {self.root}; it was left as it is. "
                f"Choose another path or overwrite it on purpose"
            ) from None
        finally:
            with contextlib.suppress(OSError):  # what is left is found by gc
                (self.root / temporary).unlink()
        self._unsynced_folders.add(self.root)
        self.sync_folders()

    def sync_folders(self) -> None:
        """Makes the names of all files created here survive a crash."""
        while self._unsynced_folders:
            folder = self._unsynced_folders.pop()
            with self._step("sync", str(folder)):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def delete_tree(self, path: str) -> None:
        """Deletes a file, or a folder with all in it, and the folders left empty above it."""
        with self._step("delete", path):
            target = self.root / path
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
            for folder in target.relative_to(self.root).parents:
                with contextlib.suppress(OSError):  # it is not empty, or not there
                    (self.root / folder).rmdir()

    def list_files(self) -> Iterator[tuple[str, int, float]]:
        """Yields path, size in bytes and time of last change (s) of every file below the root."""
        with self._step("list", ""):
            for folder, _, names in sorted(os.walk(self.root)):
                for name in sorted(names):
                    found = Path(folder, name)
                    try:
                        status = found.lstat()
                    except FileNotFoundError:  # deleted while we look
                        continue
                    path = found.relative_to(self.root).as_posix()
                    # A hard link keeps the old time of modification; that of change is new.
                    yield path, status.st_size, max(status.st_mtime, status.st_ctime)

    def _inside(self, path: str) -> Path:
        """The real path of a file, which must lie below the root whatever links it passes."""
        try:
            real = (self.root / path).resolve(strict=True)
        except RuntimeError:  # a loop of links, before Python 3.13
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        if not real.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not real.is_relative_to(self.root.resolve()):
            raise SnapshotCorrupted(
                f"{self.root / path} leads out of the snapshot, to {real}. A snapshot holds its "
                f"own files; replace the symbolic link by what it points to"
            )
        return real

    @contextlib.contextmanager
    def _existing(self, path: str) -> Iterator[None]:
        """Within it, a file that is not there is damage: the manifest names it."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_SUCH_FILE:
                raise
            raise SnapshotCorrupted(
                f"{self.root / path} is missing or no file, though the manifest names it. Restore "
                f"it from a copy of the snapshot"
            ) from None

    def _new_name(self, path: str) -> Path:
        """The place of a file to create; notes the folders whose entries change by it."""
        target = self.root / path
        folders = [target.parent]
        while not folders[-1].exists():
            folders.append(folders[-1].parent)
        for left in reversed(range(_FOLDER_TRIES)):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                break
            except FileExistsError as error:  # a file, or a link to nowhere
                raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
            except FileNotFoundError:  # another writer deleted an empty folder above it
                if not left:
                    raise
        self._unsynced_folders.update(folders)
        return target

    @contextlib.contextmanager
    def _step(self, operation: str, path: str) -> Iterator[None]:
        """One observed operation, whose system errors become ours."""
        with system_errors(f"cannot {operation} {self.root / path}"):
            self.observer(operation, path, 0)
            yield


class ReadableFile(io.RawIOBase):
    """An open file: a Python file object that also reads at any place.

    Attributes:
        size_bytes: Its size when it was opened.
        path: Its path relative to the root, for messages.
        is_verified: Whether the digest of its bytes is known to be right.
    """

    is_verified = False

    def __init__(self, target: Path, path: str, observer: Observer) -> None:
        self.path = path
        self._observer = observer
        self._position = 0
        self._descriptor = os.open(target, os.O_RDONLY)
        self.size_bytes = os.fstat(self._descriptor).st_size
        self._footer = b""

    def keep_footer(self, size_bytes: int) -> bytes:
        """Returns the last bytes, and gives these same bytes to every later read of them."""
        self._footer = self.read_at(self.size_bytes - size_bytes, size_bytes)
        return self._footer

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Returns ``size_bytes`` bytes from ``offset``.

        Raises:
            SnapshotCorrupted: If the file ends before.
        """
        if size_bytes < 0 or offset < 0 or offset + size_bytes > self.size_bytes:
            raise SnapshotCorrupted(
                f"{self.path} ends at byte {self.size_bytes}, before byte {offset + size_bytes}"
            )
        if self.closed:  # the number of the descriptor may be that of another file by now
            raise StorageUnavailable(f"cannot read {self.path}: it is closed")
        footer_at, end = self.size_bytes - len(self._footer), offset + size_bytes
        if self._footer and end > footer_at:
            before = self.read_at(offset, footer_at - offset) if offset < footer_at else b""
            return before + self._footer[max(offset, footer_at) - footer_at : end - footer_at]
        pieces = []
        with system_errors(f"cannot read {self.path}"):
            self._observer("read", self.path, size_bytes)
            while size_bytes:
                piece = os.pread(self._descriptor, size_bytes, offset)
                if not piece:
                    raise SnapshotCorrupted(f"{self.path} was truncated while it was read")
                pieces.append(piece)
                offset, size_bytes = offset + len(piece), size_bytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def as_arrow(self) -> pa.NativeFile:
        """Returns the file as one of Arrow's."""
        return pa.PythonFile(self, "r")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size_bytes}
        self._position = base[whence] + offset
        return self._position

    def read(self, size_bytes: int | None = -1) -> bytes:
        left = max(0, self.size_bytes - self._position)
        wanted = left if size_bytes is None or size_bytes < 0 else min(left, size_bytes)
        data = self.read_at(self._position, wanted) if wanted else b""
        self._position += len(data)
        return data

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


class VerifiedFile(io.BytesIO):
    """A file already read whole and found to have the right digest, in place of an open one."""

    is_verified = True

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(data)
        self._data = data
        self.path = path
        self.size_bytes = len(data)

    def read_at(self, offset: int, size_bytes: int) -> bytes | memoryview:
        """Returns ``size_bytes`` bytes from ``offset``, without a copy."""
        if size_bytes < 0 or offset < 0 or offset + size_bytes > self.size_bytes:
            raise SnapshotCorrupted(
                f"{self.path} ends at byte {self.size_bytes}, before byte {offset + size_bytes}"
            )
        return memoryview(self._data)[offset : offset + size_bytes]

    def as_arrow(self) -> pa.NativeFile:
        """Returns the bytes as a file of Arrow's."""
        return pa.BufferReader(self._data)


class WritableFile(io.RawIOBase):
    """A file being written: counts and digests its bytes; gone unless closed durably.

    Attributes:
        size_bytes: How much was written so far.
    """

    def __init__(self, target: Path, path: str, observer: Observer) -> None:
        self.path = path
        self.size_bytes = 0
        self._target = target
        self._observer = observer
        self._hasher = xxhash.xxh3_128()
        self._descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._failed = False
        self._durable = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: bytes | bytearray | memoryview | pa.Buffer) -> int:
        self._check_usable()
        view = memoryview(data).cast("B")
        self._failed = True  # until all of it is written
        with system_errors(f"cannot write {self.path}"):
            self._observer("write", self.path, len(view))
            written = 0
            while written < len(view):
                written += os.write(self._descriptor, view[written:])
        self._failed = False
        self._hasher.update(view)
        self.size_bytes += len(view)
        return len(view)

    def close_durably(self) -> str:
        """Makes the bytes survive a crash, closes, and returns their digest."""
        self._check_usable()
        with system_errors(f"cannot sync {self.path}"):
            self._observer("sync", self.path, 0)
            os.fdatasync(self._descriptor)
        self._durable = True
        self.close()
        return self._hasher.hexdigest()

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
            if not self._durable:
                self._target.unlink(missing_ok=True)
        super().close()

    def _check_usable(self) -> None:
        """Refuses to go on after an error, and after the end.

        An encoder that failed may be finalised much later and write its last bytes then, when
        the number of the descriptor is already that of another file.
        """
        if self.closed or self._failed:
            raise StorageUnavailable(f"cannot write {self.path}: it is closed, or a write failed")


@contextlib.contextmanager
def system_errors(what: str) -> Iterator[None]:
    """Turns an error of the operating system into :class:`StorageUnavailable`."""
    try:
        yield
    except (KeyGroupsError, FileExistsError):
        raise
    except OSError as error:
        cure = {
            errno.EXDEV: "source and target are on two file systems; use mode 'rewrite'",
            errno.ENOSPC: "the device is full; free space and try again",
            errno.EACCES: "permission is missing; run as a user who has it",
        }.get(error.errno or 0, "check the path, the permissions and the device")
        raise StorageUnavailable(f"{what}: {error.strerror or error}; {cure}") from error
