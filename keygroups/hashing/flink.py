"""Java's ``hashCode`` of the keys, as Apache Flink takes it before its own murmur.

One kernel a kind of type, each over at most a slice of a column without nulls, in ``uint32``
(Java's ``int`` arithmetic wraps in the same way). Formulas: the ``hashCode`` methods of
``java.lang``, ``java.math``, ``java.time`` and ``java.util.UUID`` in OpenJDK 17, and of
``org.apache.flink.api.java.tuple.TupleN`` in Flink 2.3; vectors in ``tests/golden``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.buffers import Bools, Int64s, fixed_values
from keygroups.hashing.java_string import string_hashes
from keygroups.keys import RowError, kind_of, magnitude, present_fields

U32 = npt.NDArray[np.uint32]

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
# Days since 1970 of the first and last LocalDate (years ±999,999,999) and Instant (±10^9).
_LOCAL_DAYS = (-365_243_219_162, 365_241_780_471)
_INSTANT_DAYS = (-365_243_219_528, 365_241_780_837)


def hash_into(array: pa.Array, out: U32) -> None:
    """Scheme ``flink``: writes the Java ``hashCode`` of each key of a plain, null-free array.

    Raises:
        RowError: For a value that Java's type cannot hold.
    """
    if len(array):
        _KERNELS[kind_of(array.type)](array, out)


def _bool(array: pa.Array, out: U32) -> None:
    flags: Bools = array.to_numpy(zero_copy_only=False)
    out[:] = 1237
    out[flags] = 1231


def _int(array: pa.Array, out: U32) -> None:
    width = array.type.bit_width // 8
    if width == 8:
        _long(fixed_values(array, np.int64), out)
    else:
        np.copyto(out.view(np.int32), fixed_values(array, f"i{width}"))


def _long(values: npt.NDArray[Any], out: U32) -> None:
    halves = values.view(np.uint32)
    np.bitwise_xor(halves[::2], halves[1::2], out=out)


def _float(array: pa.Array, out: U32) -> None:
    wide = array.type == pa.float64()
    values = fixed_values(array, np.float64 if wide else np.float32)
    bits = values.view(np.int64 if wide else np.int32)
    nan = np.isnan(values)
    if nan.any():  # doubleToLongBits and floatToIntBits know only one NaN
        bits = np.where(nan, bits.dtype.type(0x7FF8 << 48 if wide else 0x7FC0 << 16), bits)
    if wide:
        _long(bits, out)
    else:
        np.copyto(out, bits.view(np.uint32))


def _decimal(array: pa.Array, out: U32) -> None:
    low, high, negative = magnitude(fixed_values(array, np.uint64).reshape(-1, 2))
    out[:] = 0
    for half in (high, low):
        for word in (half >> np.uint64(32), half):
            np.multiply(out, np.uint32(31), out=out)
            np.add(out, word.astype(np.uint32), out=out)
    np.negative(out, out=out, where=negative)
    np.multiply(out, np.uint32(31), out=out)
    np.add(out, np.uint32(array.type.scale & 0xFFFFFFFF), out=out)


def _date(array: pa.Array, out: U32) -> None:
    out[:] = _local_date(fixed_values(array, np.int32).astype(np.int64))


def _time(array: pa.Array, out: U32) -> None:
    width = array.type.bit_width // 8
    ticks = fixed_values(array, f"i{width}").astype(np.int64)
    per_second = _PER_SECOND[array.type.unit]
    _expect(
        (ticks >= 0) & (ticks < 86_400 * per_second), "it is not a time between 00:00 and 24:00"
    )
    _long(ticks * (10**9 // per_second), out)


def _timestamp(array: pa.Array, out: U32) -> None:
    """``Instant.hashCode`` with a time zone, ``LocalDateTime.hashCode`` without."""
    ticks, per_second = fixed_values(array, np.int64), _PER_SECOND[array.type.unit]
    seconds = ticks // per_second
    nanos = (ticks - seconds * per_second) * (10**9 // per_second)
    days = seconds // 86_400
    instant = array.type.tz is not None
    first, last = _INSTANT_DAYS if instant else _LOCAL_DAYS
    _expect((days >= first) & (days <= last), "its year is beyond those of java.time")
    if instant:
        _long(seconds, out)
        out += np.uint32(51) * nanos.astype(np.uint32)
    else:
        _long((seconds - days * 86_400) * 10**9 + nanos, out)
        out ^= _local_date(days)


def _uuid(array: pa.Array, out: U32) -> None:
    words = fixed_values(array, ">u4").reshape(-1, 4)
    np.copyto(out, words[:, 0] ^ words[:, 1] ^ words[:, 2] ^ words[:, 3])


def _string(array: pa.Array, out: U32) -> None:
    string_hashes(array, out)


def _struct(array: pa.StructArray, out: U32) -> None:
    out[:] = 0
    for _, valid, values in present_fields(array):
        code = np.empty(len(values), np.uint32)
        try:
            hash_into(values, code)
        except RowError as bad:
            raise RowError(int(np.flatnonzero(valid)[bad.row]), bad.why) from None
        np.multiply(out, np.uint32(31), out=out)
        if len(code) == len(out):
            np.add(out, code, out=out)
        else:
            out[valid] += code


def _local_date(days: Int64s) -> U32:
    """``LocalDate.hashCode`` of days since 1970-01-01 in the proleptic ISO calendar.

    The calendar: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms",
    ``civil_from_days``: years begin in March, so that leap days come last.
    """
    shifted = days + 719_468  # since 0000-03-01
    era = shifted // 146_097
    day_of_era = (shifted - era * 146_097).astype(np.uint32)
    leaps = day_of_era // 1_460 - day_of_era // 36_524 + day_of_era // 146_096
    year_of_era = (day_of_era - leaps) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    march_month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * march_month + 2) // 5 + 1
    in_next_year = march_month >= 10  # January and February
    month = march_month + 3 - np.uint32(12) * in_next_year
    year = era.astype(np.uint32) * 400 + year_of_era + in_next_year
    code: U32 = (year & np.uint32(0xFFFFF800)) ^ ((year << 11) + (month << 6) + day)
    return code


def _expect(good: Bools, why: str) -> None:
    if not good.all():
        raise RowError(int(good.argmin()), why)


_KERNELS: dict[str, Callable[[pa.Array, U32], None]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "decimal": _decimal,
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "string": _string,
    "fixed": _uuid,  # what a plain UUID is; no other bytes are keys of this scheme
    "struct": _struct,
}
