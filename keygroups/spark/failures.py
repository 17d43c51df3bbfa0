"""Errors on their way back: what failed inside Spark is raised again as what it was.

A task or a planning worker can only send text; Spark wraps it in its own exceptions, whose
message holds the traceback. Where this library calls Spark itself it finds its errors there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException

from keygroups import errors

_OURS = re.compile(r"keygroups\.errors\.(\w+): ([^\n]*)")


@contextmanager
def our_errors() -> Iterator[None]:
    """Raises an error of this library where Spark reports one from a worker."""
    try:
        yield
    except PySparkException as error:
        found = _OURS.findall(str(error))
        name, message = found[-1] if found else ("", "")  # the last one is the outermost
        kind = getattr(errors, name, None)
        if not isinstance(kind, type) or not issubclass(kind, errors.KeyGroupsError):
            raise
        raise kind(message.strip()) from error
