"""Places for the files of a test: in memory where there is a file system for it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keygroups.snapshot import reader
from keygroups.snapshot.backend import get_backend

_IN_MEMORY = "/dev/shm"  # noqa: S108 - each test makes its own directory below it


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder for the length of the block; syncing it to disk costs nothing."""
    where = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="keygroups-", dir=where) as folder:
        yield Path(folder)


@contextlib.contextmanager
def reading_in_part() -> Iterator[None]:
    """Within it, small segments too are read only where they are asked for, as large ones."""
    before = reader.SMALL_SEGMENT_BYTES
    reader.SMALL_SEGMENT_BYTES = 0
    try:
        yield
    finally:
        reader.SMALL_SEGMENT_BYTES = before


@contextlib.contextmanager
def segment_size(backend: str, size_bytes: int) -> Iterator[None]:
    """Within it, a backend makes segments of this size, so that few rows fill several."""
    store = type(get_backend(backend))
    before = store.segment_size_bytes
    store.segment_size_bytes = size_bytes
    try:
        yield
    finally:
        store.segment_size_bytes = before
