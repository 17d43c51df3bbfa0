"""Where the entries of RocksDB table files go: Arrow columns in memory taken beforehand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.errors import SnapshotCorrupted

_Int64s = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


def lower_bound(count: int, key: Callable[[int], bytes], wanted: bytes) -> int:
    """First of ``count`` sorted keys that is not less than ``wanted``; ``count`` if none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if key(middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


class _Column:
    """One growing binary column in memory taken beforehand."""

    def __init__(self, name: str, rows: int, size: int) -> None:
        self._name = name
        # Arrow's pool gives warm memory where NumPy's allocator gives new pages every time.
        self._buffers = (pa.allocate_buffer(8 * (rows + 1)), pa.allocate_buffer(size))
        self.offsets: _Int64s = np.frombuffer(self._buffers[0], np.int64)
        self.data: _Bytes = np.frombuffer(self._buffers[1], np.uint8)
        self.offsets[0] = 0
        self._rows = 0

    def key(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def reserve(self, size: int) -> int:
        """Check that ``size`` more bytes fit; returns where they go."""
        used = int(self.offsets[self._rows])
        if used + size > len(self.data):
            raise SnapshotCorrupted(
                f"SST blocks hold at least {used + size} bytes of {self._name}, its properties "
                f"and block sizes allow {len(self.data)}"
            )
        return used

    def advance_fixed(self, rows: int, width: int) -> None:
        """Account for ``rows`` values of one width that were put behind the others."""
        start = self.offsets[self._rows]
        steps = np.arange(1, rows + 1, dtype=np.int64)
        np.multiply(steps, width, out=steps)
        np.add(steps, start, out=self.offsets[self._rows + 1 : self._rows + 1 + rows])
        self._rows += rows

    def append(self, values: pa.LargeBinaryArray) -> None:
        """Copy values behind the others."""
        rows = len(values)
        _, offset_buffer, data = values.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64, rows + 1, 8 * values.offset)
        size = int(offsets[-1] - offsets[0])
        used = self.reserve(size)
        if size:
            self.data[used : used + size] = np.frombuffer(data, np.uint8, size, int(offsets[0]))
        end = self._rows + 1 + rows
        np.add(offsets[1:], used - offsets[0], out=self.offsets[self._rows + 1 : end])
        self._rows += rows

    def slice(self, start: int, stop: int) -> pa.LargeBinaryArray:
        offsets, data = self._buffers
        used = int(self.offsets[self._rows])
        filled = [None, offsets.slice(0, 8 * (self._rows + 1)), data.slice(0, used)]
        array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), self._rows, filled)
        return array.slice(start, stop - start)


class Columns:
    """Keys and values decoded so far.

    Args:
        rows: Most entries that may come.
        key_bytes: Most bytes that all keys may have.
        value_bytes: Most bytes that all values may have.
    """

    def __init__(self, *, rows: int, key_bytes: int, value_bytes: int) -> None:
        self._limit = rows
        self.rows = 0
        self.keys = _Column("keys", rows, key_bytes)
        self.values = _Column("values", rows, value_bytes)

    def admit(self, rows: int) -> None:
        """Check that there is room for ``rows`` more entries, and count them."""
        self.rows += rows
        if self.rows > self._limit:
            raise SnapshotCorrupted(
                f"SST blocks hold at least {self.rows} entries, its properties and block sizes "
                f"allow {self._limit}"
            )

    def between(
        self, lower: bytes | None, upper: bytes | None
    ) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
        """The decoded entries with ``lower <= key < upper``."""
        start = 0 if lower is None else lower_bound(self.rows, self.keys.key, lower)
        stop = self.rows if upper is None else lower_bound(self.rows, self.keys.key, upper)
        stop = max(start, stop)
        return self.keys.slice(start, stop), self.values.slice(start, stop)
