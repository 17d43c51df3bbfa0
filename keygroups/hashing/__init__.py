"""From keys to key groups: Arrow columns in, no Python a row.

A *scheme* is a hash of 32 bits and how it becomes a key group:

========= ============================================= ===================================
scheme    hash                                          key group of ``max_parallelism`` M
========= ============================================= ===================================
flink     Java's ``hashCode``                           ``abs_(murmur3(LE32(hash))) mod M``
murmur3   murmur3_x86_32 of :mod:`keygroups.keys` bytes ``abs_(hash) mod M``
spark     Spark's ``hash(key)``                         ``pmod(hash, M)``
========= ============================================= ===================================

where ``abs_(-2^31)`` is 0. Formulas: Apache Flink 2.3, ``KeyGroupRangeAssignment`` and
``MathUtils.murmurHash``; each scheme's module says its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.assignment import check_max_parallelism
from keygroups.buffers import plain
from keygroups.errors import InvalidArgument
from keygroups.hashing import flink, murmur3, spark
from keygroups.hashing.scalar import java_hash_code, key_array
from keygroups.hashing.schemes import SCHEMES, check_key_type, check_scheme
from keygroups.keys import RowError, check_no_nulls

__all__ = [
    "SCHEMES",
    "assign_key_groups",
    "assign_to_key_group",
    "check_key_type",
    "check_scheme",
    "hash_keys",
    "key_groups_of_hashes",
]

I32: TypeAlias = npt.NDArray[np.int32]
U16: TypeAlias = npt.NDArray[np.uint16]
U32: TypeAlias = npt.NDArray[np.uint32]

_SLICE_ROWS = 1 << 16  # hashes of a slice and their scratch stay in the second-level cache
_HASHERS: dict[str, Callable[[pa.Array, U32], None]] = {
    "flink": flink.hash_into,
    "murmur3": murmur3.hash_into,
    "spark": spark.hash_into,
}


def hash_keys(keys: pa.Array | pa.ChunkedArray, scheme: str = "flink") -> pa.Int32Array:
    """Hashes keys; under scheme ``flink`` this is Java's ``hashCode``, before the murmur.

    Raises:
        InvalidArgument: For a null key, a key type that the scheme does not take, or a value
            that has no hash (the message names the row).
    """
    chunks = _checked(keys, scheme)
    hashes = np.empty(len(keys), np.uint32)
    _for_each_row(chunks, _HASHERS[scheme], hashes)
    return pa.array(hashes.view(np.int32))


def key_groups_of_hashes(
    hashes: pa.Int32Array | I32, max_parallelism: int, scheme: str = "flink"
) -> U16:
    """Returns the key group of each hash that :func:`hash_keys` gave under this scheme.

    Raises:
        InvalidArgument: For hashes that are not int32 or are null, an unknown scheme, or a
            ``max_parallelism`` outside [1, 32768].
    """
    check_scheme(scheme)
    max_parallelism = check_max_parallelism(max_parallelism)
    if isinstance(hashes, pa.Array | pa.ChunkedArray):
        check_no_nulls(hashes, "the hash")
        hashes = hashes.to_numpy()
    if not isinstance(hashes, np.ndarray) or hashes.dtype != np.int32 or hashes.ndim != 1:
        what = getattr(hashes, "dtype", type(hashes).__name__)
        raise InvalidArgument(f"hashes must be a flat array of int32, got {what}")
    groups = np.empty(len(hashes), np.uint16)
    for at in range(0, len(hashes), _SLICE_ROWS):
        piece = hashes[at : at + _SLICE_ROWS].astype(np.int32).view(np.uint32)
        _groups_into(piece, max_parallelism, scheme, groups[at : at + _SLICE_ROWS])
    return groups


def assign_key_groups(
    keys: pa.Array | pa.ChunkedArray, max_parallelism: int, scheme: str = "flink"
) -> pa.UInt16Array:
    """Returns the key group of each key.

    Raises:
        InvalidArgument: As :func:`hash_keys`, or for a ``max_parallelism`` outside [1, 32768].
    """
    chunks = _checked(keys, scheme)
    max_parallelism = check_max_parallelism(max_parallelism)
    hasher, scratch = _HASHERS[scheme], np.empty(min(len(keys), _SLICE_ROWS), np.uint32)

    def key_groups_into(array: pa.Array, out: U16) -> None:
        hashes = scratch[: len(array)]
        hasher(array, hashes)
        _groups_into(hashes, max_parallelism, scheme, out)

    groups = np.empty(len(keys), np.uint16)
    _for_each_row(chunks, key_groups_into, groups)
    return pa.array(groups)


def assign_to_key_group(
    key: object, max_parallelism: int, scheme: str = "flink", type: pa.DataType | None = None
) -> int:
    """Returns the key group of one key: what :func:`assign_key_groups` gives for a column of it.

    Args:
        key: bool, int (hashed as int64), float, str, bytes, Decimal, date, datetime, time,
            UUID, a NumPy scalar, or a tuple of those and ``None``.
        max_parallelism: Number of key groups.
        scheme: One of :data:`SCHEMES`.
        type: The Arrow type of the key's column, inferred if ``None``.

    Raises:
        InvalidArgument: As :func:`assign_key_groups`, or if the key has no Arrow type or is no
            value of ``type``.
    """
    if type is not None:
        check_key_type(type, scheme)
    elif scheme == "flink" and (code := java_hash_code(key)) is not None:
        murmur = mmh3.hash(code.to_bytes(4, "little"), 0, signed=True)
        return (abs(murmur) & 0x7FFFFFFF) % check_max_parallelism(max_parallelism)
    array = key_array(key, type)
    return int(assign_key_groups(array, max_parallelism, scheme)[0].as_py())


def _checked(keys: pa.Array | pa.ChunkedArray, scheme: str) -> list[pa.Array]:
    """The chunks of a column that the scheme takes."""
    check_scheme(scheme)
    if not isinstance(keys, pa.Array | pa.ChunkedArray):
        raise InvalidArgument(f"keys must be a pyarrow array, got {type(keys).__name__}")
    check_key_type(keys.type, scheme)
    return keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]


def _for_each_row(
    chunks: list[pa.Array], compute: Callable[[pa.Array, Any], None], out: npt.NDArray[Any]
) -> None:
    first_row = 0
    for chunk in chunks:
        piece = out[first_row : first_row + len(chunk)]
        if not _from_dictionary(chunk, compute, piece):
            _in_slices(plain(chunk), compute, piece, first_row)
        first_row += len(chunk)


def _from_dictionary(
    chunk: pa.Array, compute: Callable[[pa.Array, Any], None], out: npt.NDArray[Any]
) -> bool:
    """Computes each entry of a dictionary once, if that is less work and nothing is wrong."""
    if not isinstance(chunk, pa.DictionaryArray) or chunk.null_count:
        return False
    if len(chunk.dictionary) > len(chunk):
        return False
    table = np.empty(len(chunk.dictionary), out.dtype)
    try:
        _in_slices(plain(chunk.dictionary), compute, table)
    except InvalidArgument:
        return False  # the plain way knows the row, or that no row has the null or bad entry
    np.take(table, chunk.indices.to_numpy(), out=out)
    return True


def _in_slices(
    array: pa.Array,
    compute: Callable[[pa.Array, Any], None],
    out: npt.NDArray[Any],
    first_row: int = 0,
) -> None:
    check_no_nulls(array, "the key", first_row)
    for at in range(0, len(array), _SLICE_ROWS):
        try:
            compute(array.slice(at, _SLICE_ROWS), out[at : at + _SLICE_ROWS])
        except RowError as bad:
            row = first_row + at + bad.row
            raise InvalidArgument(f"the key in row {row} has no hash: {bad.why}") from None


def _groups_into(hashes: U32, max_parallelism: int, scheme: str, out: U16) -> None:
    """Writes key groups; the hashes are used up."""
    scratch = np.empty_like(hashes)
    m = np.uint32(max_parallelism)
    if scheme == "flink":
        murmur3.hash_word(hashes, scratch)
    if scheme != "spark":
        signed = hashes.view(np.int32)
        np.abs(signed, out=signed)  # leaves -2^31, whose only bit each way below takes off
    if max_parallelism & (max_parallelism - 1) == 0:
        np.bitwise_and(hashes, m - np.uint32(1), out=hashes)
    elif scheme == "spark":
        # Shifted by 2^31 it is unsigned; the shift is taken back after the remainder.
        np.bitwise_xor(hashes, np.uint32(1 << 31), out=hashes)
        _remainder(hashes, m, scratch)
        np.add(hashes, np.uint32(-(1 << 31) % max_parallelism), out=hashes)
        _remainder(hashes, m, scratch)
    else:
        np.bitwise_and(hashes, np.uint32(0x7FFFFFFF), out=hashes)
        _remainder(hashes, m, scratch)
    np.copyto(out, hashes, casting="unsafe")


def _remainder(values: U32, divisor: np.uint32, scratch: U32) -> None:
    """As ``np.remainder``, which is half as fast as dividing and multiplying back."""
    np.floor_divide(values, divisor, out=scratch)
    np.multiply(scratch, divisor, out=scratch)
    np.subtract(values, scratch, out=values)
