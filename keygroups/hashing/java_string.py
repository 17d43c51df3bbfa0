"""``java.lang.String.hashCode`` of string columns: ``h = 31 * h + c`` over UTF-16 units.

The hash is a polynomial in 31 modulo 2^32, so it need not be folded character by character:

* Rows of one length: their bytes are padded in front to words of eight (a leading zero adds
  nothing) and all bytes of a word are combined in three steps of pairs.
* Rows of any length: 31 is odd and has an inverse modulo 2^32. With the running sum
  ``C[j] = sum of c[i] * 31^-i for i < j``, the row ``[s, e)`` is ``(C[e] - C[s]) * 31^(e-1)``.

Non-ASCII text is transcoded to UTF-16 units first and then goes the second way.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.buffers import Bytes, Int64s, byte_spans
from keygroups.keys import decode_utf8

U16: TypeAlias = npt.NDArray[np.uint16]
U32: TypeAlias = npt.NDArray[np.uint32]

_BLOCK_ROWS = 1 << 13
_BLOCK_UNITS = 1 << 18  # the running sum of a block stays in the second-level cache
_BLOCK_WORDS = 1 << 14
_MOD = 1 << 32


def string_hashes(array: pa.Array, out: U32) -> None:
    """Writes the hash of each string of a plain, null-free array.

    Raises:
        RowError: For a row that is neither UTF-8 nor UTF-8 with lone surrogates.
    """
    data, offsets = byte_spans(array)
    if int(data.max(initial=0)) >= 0x80:
        units, ends = _utf16(data, offsets)
        _hash_runs(units, ends, out)
        return
    length = int(offsets[1])
    if 0 < length <= _BLOCK_UNITS and (offsets[1:] - offsets[:-1] == length).all():
        _hash_matrix(data.reshape(len(out), length), out)
    else:
        _hash_runs(data, offsets, out)


def _utf16(data: Bytes, offsets: Int64s) -> tuple[U16, Int64s]:
    """The UTF-16 units of all rows, and the offsets into them."""
    text = decode_utf8(data, offsets)
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), "<u2")
    # A unit for each byte that begins a character, two for one of four bytes.
    counts = ((data & 0xC0) != 0x80).view(np.uint8) + (data >= 0xF0)
    before = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    return units, before[offsets]


def _hash_matrix(matrix: Bytes, out: U32) -> None:
    rows, length = matrix.shape
    words = -(-length // 8)
    step = max(1, _BLOCK_WORDS // words)
    padded = np.zeros((min(step, rows), 8 * words), np.uint8)
    scratch = np.empty(padded.size // 8, np.uint64)
    base = np.uint32(pow(31, 8, _MOD))
    for at in range(0, rows, step):
        block, h = matrix[at : at + step], out[at : at + step]
        padded[: len(block), -length:] = block
        eights = padded[: len(block)].reshape(-1).view("<u8")
        _hash_eights(eights, scratch[: len(eights)])
        codes = eights.view("<u4")[::2].reshape(len(block), words)
        h[:] = codes[:, 0]
        for column in range(1, words):
            np.multiply(h, base, out=h)
            np.add(h, codes[:, column], out=h)
        padded[: len(block), : 8 * words - length] = 0


def _hash_eights(words: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> None:
    """Leaves the hash of the eight bytes of each word in its low half."""
    for bits, mask, power in (
        (8, 0x00FF00FF00FF00FF, 31),
        (16, 0x0000FFFF0000FFFF, 31**2),
        (32, 0x00000000FFFFFFFF, 31**4),
    ):
        # In each pair of lanes the lower one holds the earlier bytes. No lane overflows: a
        # pair is at most 255 * 32, two pairs are at most that * 962.
        np.right_shift(words, np.uint64(bits), out=scratch)
        np.bitwise_and(scratch, np.uint64(mask), out=scratch)
        np.bitwise_and(words, np.uint64(mask), out=words)
        np.multiply(words, np.uint64(power), out=words)
        np.add(words, scratch, out=words)


def _hash_runs(units: Bytes | U16, offsets: Int64s, out: U32) -> None:
    """The running sum, in blocks of whole rows."""
    rows, first = len(out), 0
    sums = np.empty(min(int(offsets[-1]), _BLOCK_UNITS) + 1, np.uint32)
    while first < rows:
        start = int(offsets[first])
        last = int(np.searchsorted(offsets, start + _BLOCK_UNITS, "right")) - 1
        last = min(last, first + _BLOCK_ROWS, rows)
        if last == first:  # one row, longer than a block
            out[first] = _hash_long(units[start : int(offsets[first + 1])])
            first += 1
            continue
        ends = offsets[first : last + 1] - start
        _hash_block(units[start : start + int(ends[-1])], ends, out[first:last], sums)
        first = last


def _hash_block(units: Bytes | U16, ends: Int64s, out: U32, sums: U32) -> None:
    up, down = _powers(31), _powers(pow(31, -1, _MOD))
    terms = sums[1 : len(units) + 1]
    sums[0] = 0
    np.multiply(units, down[: len(units)], out=terms, dtype=np.uint32)
    np.cumsum(terms, out=terms)
    at = sums[ends]
    np.subtract(at[1:], at[:-1], out=out)
    # An empty row at the start has no last unit; its difference is 0 whatever the power.
    np.multiply(out, up[np.maximum(ends[1:] - 1, 0)], out=out)


def _hash_long(units: Bytes | U16) -> int:
    h = 0
    for at in range(0, len(units), _BLOCK_UNITS):
        piece = units[at : at + _BLOCK_UNITS].astype(np.uint32)
        terms = piece * _powers(31)[: len(piece)][::-1]
        h = (h * pow(31, len(piece), _MOD) + int(terms.sum(dtype=np.uint32))) % _MOD
    return h


@cache
def _powers(base: int) -> U32:
    """``base^i`` modulo 2^32 for every unit of a block, by doubling."""
    powers = np.ones(_BLOCK_UNITS, np.uint32)
    known = 1
    while known < len(powers):
        np.multiply(
            powers[:known], np.uint32(pow(base, known, _MOD)), out=powers[known : 2 * known]
        )
        known *= 2
    return powers
