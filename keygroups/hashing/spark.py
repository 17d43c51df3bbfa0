"""Spark's ``hash(key)``: Murmur3 with seed 42, chained column by column through a struct.

Each kernel updates ``h``, which holds the seeds, in place. Formulas: Apache Spark,
``Murmur3Hash`` and ``InterpretedHashFunction`` in
``org.apache.spark.sql.catalyst.expressions.hash`` and ``Murmur3_x86_32.hashUnsafeBytes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.buffers import Bools, Bytes, Int64s, byte_spans, fixed_values
from keygroups.hashing.murmur3 import U32, finish, hash_spans, mix_word
from keygroups.keys import RowError, kind_of, magnitude, present_fields

SEED = 42
_MAX_LONG_DIGITS = 18
_MICROS = {"s": 10**6, "ms": 10**3, "us": 1}


def hash_into(array: pa.Array, out: U32) -> None:
    """Scheme ``spark``: writes ``hash(key)`` of each key of a plain array without nulls.

    Raises:
        RowError: For a timestamp that is no whole number of microseconds in 64 bits.
    """
    out[:] = SEED
    _chain(array, out)


def _chain(array: pa.Array, h: U32) -> None:
    if len(array):
        _KERNELS[kind_of(array.type)](array, h)


def _bool(array: pa.Array, h: U32) -> None:
    flags: Bools = array.to_numpy(zero_copy_only=False)
    _hash_words(h, flags.astype(np.uint32))


def _int(array: pa.Array, h: U32) -> None:
    width = array.type.bit_width // 8
    values = fixed_values(array, f"i{width}")
    if width == 8:
        _hash_longs(h, values)
    else:
        _hash_words(h, values.astype(np.int32).view(np.uint32))


def _float(array: pa.Array, h: U32) -> None:
    wide = array.type == pa.float64()
    values = fixed_values(array, np.float64 if wide else np.float32)
    bits = values.view(np.int64 if wide else np.int32).copy()
    bits[values == 0] = 0  # -0.0 is 0.0
    bits[np.isnan(values)] = 0x7FF8 << 48 if wide else 0x7FC0 << 16
    if wide:
        _hash_longs(h, bits)
    else:
        _hash_words(h, bits.view(np.uint32))


def _date(array: pa.Array, h: U32) -> None:
    _hash_words(h, fixed_values(array, np.uint32).copy())


def _timestamp(array: pa.Array, h: U32) -> None:
    ticks = fixed_values(array, np.int64)
    if array.type.unit == "ns":
        micros = ticks // 1000
        good = micros * 1000 == ticks
        why = "it has nanoseconds, which Spark's timestamps have not; round it to microseconds"
    else:
        micros = ticks * _MICROS[array.type.unit]
        good = micros // _MICROS[array.type.unit] == ticks
        why = "its microseconds exceed 64 bits, so that it is no timestamp of Spark"
    if not good.all():
        raise RowError(int(good.argmin()), why)
    _hash_longs(h, micros)


def _string(array: pa.Array, h: U32) -> None:
    data, offsets = byte_spans(array)
    hash_spans(h, data, offsets[:-1], offsets[1:] - offsets[:-1], _byte_tail)


def _decimal(array: pa.Array, h: U32) -> None:
    """An unscaled long up to 18 digits, else the bytes of ``BigInteger.toByteArray``."""
    low_high = fixed_values(array, np.uint64).reshape(-1, 2)
    if array.type.precision <= _MAX_LONG_DIGITS:
        _hash_longs(h, np.ascontiguousarray(low_high[:, 0]))
        return
    data = low_high[:, ::-1].astype(">u8").view(np.uint8)
    # As few bytes as keep the sign: leading bytes that repeat the sign bit below are dropped.
    _, _, negative = magnitude(low_high)
    filler = np.where(negative, np.uint8(0xFF), np.uint8(0))[:, None]
    differs = data ^ filler
    first = np.where(differs.any(axis=1), (differs != 0).argmax(axis=1), 15)
    spare = differs[np.arange(len(data)), first] >= 0x80  # its top bit is not the sign
    starts = np.arange(len(data)) * 16 + first - spare
    lengths = 16 - first + spare
    hash_spans(h, data.reshape(-1), starts, lengths, _byte_tail)


def _struct(array: pa.StructArray, h: U32) -> None:
    for _, valid, values in present_fields(array):
        # A null leaves the seed as it is.
        seeds = h if len(values) == len(h) else h[valid]
        try:
            _chain(values, seeds)
        except RowError as bad:
            raise RowError(int(np.flatnonzero(valid)[bad.row]), bad.why) from None
        if seeds is not h:
            h[valid] = seeds


def _hash_words(h: U32, words: U32) -> None:
    """``Murmur3_x86_32.hashInt``; ``words`` is used up."""
    scratch = np.empty_like(words)
    mix_word(h, words, scratch)
    finish(h, 4, scratch)


def _hash_longs(h: U32, values: npt.NDArray[Any]) -> None:
    """``Murmur3_x86_32.hashLong``: the low half, then the high half."""
    halves, scratch = values.view("<u4"), np.empty_like(h)
    mix_word(h, halves[::2].copy(), scratch)
    mix_word(h, halves[1::2].copy(), scratch)
    finish(h, 8, scratch)


def _byte_tail(h: U32, data: Bytes, starts: Int64s, lengths: Int64s) -> None:
    """Spark's own tail: each byte of the rest is a word of its own, sign-extended."""
    signed = data.view(np.int8)
    for index in range(3):
        rows = np.flatnonzero(lengths > index)
        if rows.size:
            state = h[rows]
            words = signed[starts[rows] + index].astype(np.int32).view(np.uint32)
            mix_word(state, words, np.empty_like(state))
            h[rows] = state


_KERNELS: dict[str, Callable[[pa.Array, U32], None]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "date": _date,
    "timestamp": _timestamp,
    "string": _string,
    "binary": _string,
    "fixed": _string,
    "decimal": _decimal,
    "struct": _struct,
}
