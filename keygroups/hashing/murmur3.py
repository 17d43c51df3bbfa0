"""MurmurHash3_x86_32 over many keys at once, in place on ``uint32`` arrays.

``h`` is one hash state a key, updated in place: :func:`mix_word` takes in four bytes of each
key, :func:`finish` ends it. Formula: Austin Appleby, MurmurHash3.cpp, ``MurmurHash3_x86_32``;
in Java it is ``org.apache.flink.util.MathUtils.murmurHash`` (one word, seed 0) and
``org.apache.spark.unsafe.hash.Murmur3_x86_32`` (seed 42, a tail of its own).

Rows of unequal length go by blocks of at most 32768 rows, sorted by their number of words, so
that each step works on a prefix. Keys beyond 1 KiB go to mmh3 one by one: a step for the few
rows that are that long would cost more than the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.buffers import Bytes, Int64s, byte_spans
from keygroups.keys import encode_keys

U32: TypeAlias = npt.NDArray[np.uint32]
Tail: TypeAlias = Callable[[U32, Bytes, Int64s, Int64s], None]

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_M1, _M2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_BLOCK_ROWS = 1 << 15
_BLOCK_BYTES = 1 << 18  # a block of equally long rows stays in the second-level cache
_LONG_WORDS = 256


def hash_into(array: pa.Array, out: U32) -> None:
    """Scheme ``murmur3``: hashes the canonical key bytes of a column without nulls, seed 0."""
    out[:] = 0
    data, offsets = byte_spans(encode_keys([array]))
    hash_spans(out, data, offsets[:-1], offsets[1:] - offsets[:-1], standard_tail)


def hash_spans(h: U32, data: Bytes, starts: Int64s, lengths: Int64s, tail: Tail) -> None:
    """Hashes ``lengths`` bytes from ``starts`` of each row into the state ``h`` and ends it.

    Args:
        h: The seeds; becomes the hashes.
        data: The bytes of all rows.
        starts: Where each row begins, ascending.
        lengths: How many bytes each row has.
        tail: Takes in the last ``length % 4`` bytes of each row.
    """
    rows = len(h)
    if rows == 0:
        return
    length = int(lengths[0])
    if length <= 4 * _LONG_WORDS and (lengths == length).all() and _adjoin(starts, length):
        first = int(starts[0])
        _hash_matrix(h, data[first : first + rows * length].reshape(rows, length), tail)
        return
    padded = np.concatenate((data, np.zeros(3, np.uint8)))  # a last partial word can be read
    for at in range(0, rows, _BLOCK_ROWS):
        block = slice(at, at + _BLOCK_ROWS)
        _hash_block(h[block], padded, starts[block], lengths[block], tail)


def standard_tail(h: U32, data: Bytes, starts: Int64s, lengths: Int64s) -> None:
    """The tail of the published function: the rest of up to 3 bytes as one word, zero-filled."""
    words = _words_at(data, starts) & ((np.uint32(1) << (8 * lengths).astype(np.uint32)) - 1)
    scramble(words, np.empty_like(words))
    h ^= words


def hash_word(word: U32, scratch: U32) -> None:
    """Hashes one word with seed 0, in place."""
    scramble(word, scratch)
    _mix_state(word, scratch)
    finish(word, 4, scratch)


def mix_word(h: U32, word: U32, scratch: U32) -> None:
    """Takes one little-endian word of each key into the state; ``word`` is used up."""
    scramble(word, scratch)
    np.bitwise_xor(h, word, out=h)
    _mix_state(h, scratch)


def scramble(word: U32, scratch: U32) -> None:
    """Mixes the bits of a word, in place."""
    np.multiply(word, _C1, out=word)
    _rotate_left(word, 15, scratch)
    np.multiply(word, _C2, out=word)


def finish(h: U32, length: U32 | int, scratch: U32) -> None:
    """Ends the hashes of keys of ``length`` bytes, in place."""
    np.bitwise_xor(h, np.uint32(length) if isinstance(length, int) else length, out=h)
    _xor_shift(h, 16, scratch)
    np.multiply(h, _M1, out=h)
    _xor_shift(h, 13, scratch)
    np.multiply(h, _M2, out=h)
    _xor_shift(h, 16, scratch)


def _hash_matrix(h: U32, matrix: Bytes, tail: Tail) -> None:
    rows, length = matrix.shape
    step = max(1024, _BLOCK_BYTES // max(length, 1))
    buffers = np.empty((2, min(step, rows)), np.uint32)
    for at in range(0, rows, step):
        state, block = h[at : at + step], matrix[at : at + step]
        word, scratch = buffers[:, : len(state)]
        end = length & ~3
        for column in range(0, end, 4):
            word[:] = np.ndarray(len(state), "<u4", block, column, (length,))
            mix_word(state, word, scratch)
        if end < length:
            starts = np.arange(len(state), dtype=np.int64) * length + end
            padded = np.concatenate((block.reshape(-1), np.zeros(3, np.uint8)))
            tail(state, padded, starts, np.full(len(state), length - end))
        finish(state, length, scratch)


def _hash_block(h: U32, data: Bytes, starts: Int64s, lengths: Int64s, tail: Tail) -> None:
    words = lengths >> 2
    is_long = words > _LONG_WORDS
    # Long rows are whole already; they sort last, as if they had no words left.
    left = np.where(is_long, 0, words).astype(np.uint16)
    order = np.argsort(left, kind="stable")[::-1]
    state, at, left = h[order], starts[order], left[order]
    steps = int(left[0])
    active = len(h) - np.searchsorted(left[::-1], np.arange(steps), side="right")
    scratch = np.empty(len(h), np.uint32)
    for step, n in enumerate(active.tolist()):
        mix_word(state[:n], _words_at(data, at[:n] + 4 * step), scratch[:n])
    h[order] = state
    for row in np.flatnonzero(is_long).tolist():
        start, size = int(starts[row]), 4 * int(words[row])
        h[row] = _body(data[start : start + size], int(h[row]))
    rest = lengths & 3
    with_tail = np.flatnonzero(rest)
    if with_tail.size:
        state = h[with_tail]
        tail(state, data, (starts + 4 * words)[with_tail], rest[with_tail])
        h[with_tail] = state
    finish(h, lengths.astype(np.uint32), scratch)


def _body(data: Bytes, seed: int) -> int:
    """The state after whole words, before the end: mmh3's hash with the end undone."""
    h = mmh3.hash(data.tobytes(), seed, signed=False)
    h ^= h >> 16
    h = h * pow(int(_M2), -1, 1 << 32) & 0xFFFFFFFF
    h ^= h >> 13 ^ h >> 26
    h = h * pow(int(_M1), -1, 1 << 32) & 0xFFFFFFFF
    h ^= h >> 16
    return h ^ len(data)


def _words_at(data: Bytes, starts: Int64s) -> U32:
    """Gathers the little-endian words that begin at any byte."""
    windows: U32 = np.ndarray(len(data) - 3, "<u4", data, 0, (1,))
    return windows[starts]


def _adjoin(starts: Int64s, length: int) -> bool:
    return bool((starts[1:] - starts[:-1] == length).all())


def _mix_state(h: U32, scratch: U32) -> None:
    _rotate_left(h, 13, scratch)
    np.multiply(h, np.uint32(5), out=h)
    np.add(h, np.uint32(0xE6546B64), out=h)


def _rotate_left(h: U32, bits: int, scratch: U32) -> None:
    np.left_shift(h, np.uint32(bits), out=scratch)
    np.right_shift(h, np.uint32(32 - bits), out=h)
    np.bitwise_or(h, scratch, out=h)


def _xor_shift(h: U32, bits: int, scratch: U32) -> None:
    np.right_shift(h, np.uint32(bits), out=scratch)
    np.bitwise_xor(h, scratch, out=h)
