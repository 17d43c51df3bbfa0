"""Faults by counting: every step of storage is seen, so any one of them can fail or kill.

A step is one operation that :class:`~keygroups.snapshot.storage.LocalStorage` announces before it
does it. A test runs an action once to count its steps, and then once for each step with a fault
there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from keygroups.snapshot.storage import LocalStorage, Observer, ignore


@dataclass
class Steps:
    """An observer that remembers ``(operation, path, size_bytes)`` of each step."""

    seen: list[tuple[str, str, int]] = field(default_factory=list)

    def __call__(self, operation: str, path: str, size_bytes: int) -> None:
        """Remembers a step."""
        self.seen.append((operation, path, size_bytes))

    def __len__(self) -> int:
        return len(self.seen)

    def paths(self, operation: str) -> set[str]:
        """Returns the distinct paths of an operation."""
        return {path for name, path, _ in self.seen if name == operation}

    def bytes(self, operation: str, path: str | None = None) -> int:
        """Returns how many bytes an operation moved, of one path or of all."""
        return sum(n for name, at, n in self.seen if name == operation and path in (None, at))


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within it, every storage that is made tells ``observer`` its steps, whoever makes it."""
    original: Callable[..., None] = LocalStorage.__init__

    def init(self: LocalStorage, root: Any, own: Observer = ignore) -> None:
        def both(operation: str, path: str, size_bytes: int) -> None:
            observer(operation, path, size_bytes)
            own(operation, path, size_bytes)

        original(self, root, both)

    storage: Any = LocalStorage
    storage.__init__ = init
    try:
        yield
    finally:
        storage.__init__ = original


def fail_at(number: int, error: OSError, *, ever_after: bool = False) -> Observer:
    """Returns an observer that raises ``error`` at step ``number``, the first being 0.

    Args:
        number: Which step fails.
        error: What it fails with.
        ever_after: Whether all later steps fail too, as on a device that is gone.
    """
    count, lock = 0, threading.Lock()

    def observer(_operation: str, path: str, _size_bytes: int) -> None:
        nonlocal count
        with lock:
            at, count = count, count + 1
        if at == number or (ever_after and at > number):
            raise type(error)(error.errno, os.strerror(error.errno or 0), path)

    return observer
