"""Digests: 64 bits of a row, whose sum over a key group tells two groups apart.

The sum is independent of order, of the encoding and of how rows lie in files, so any two
snapshots can be compared group by group and every rescale can prove that it lost nothing.
It guards against accidents, not against an adversary. Definition and test vectors:
FORMAT.md, "Digests".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from keygroups.buffers import (
    byte_spans,
    fixed_width_values,
    is_fixed_width,
    is_variable_width,
)
from keygroups.snapshot.rows import encode_rows, null_bitmap

UInt64s: TypeAlias = npt.NDArray[np.uint64]

SEED = np.uint64(0x6B65_7967_726F_7570)  # "keygroup"
MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
_FINAL_1 = np.uint64(0xFF51_AFD7_ED55_8CCD)
_FINAL_2 = np.uint64(0xC4CE_B9FE_1A85_EC53)
_CHUNK_ROWS = 1 << 15  # a chunk's words stay in the processor's second-level cache
_TAIL_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)


def digest_rows(columns: Sequence[pa.Array], row_count: int) -> UInt64s:
    """Returns the digest of each row of ``columns``, key columns first, in schema order."""
    digests = np.empty(row_count, np.uint64)
    for start in range(0, row_count, _CHUNK_ROWS):
        rows = min(_CHUNK_ROWS, row_count - start)
        digests[start : start + rows] = _digest_chunk([c.slice(start, rows) for c in columns], rows)
    return digests


def digest_bytes(data: bytes | memoryview | pa.Buffer) -> str:
    """Returns the digest of a file: 32 hexadecimal digits of XXH3-128."""
    return xxhash.xxh3_128_hexdigest(data)


def _digest_chunk(columns: Sequence[pa.Array], rows: int) -> UInt64s:
    state = np.full(rows, SEED)
    _absorb_fixed(state, null_bitmap(columns, rows))
    for column in columns:
        if is_fixed_width(column.type):
            _absorb_fixed(state, fixed_width_values(column))
        elif is_variable_width(column.type):
            _absorb_variable(state, *byte_spans(column))
        else:
            _absorb_variable(state, *byte_spans(encode_rows([column], rows)))
    state ^= state >> np.uint64(33)
    state *= _FINAL_1
    state ^= state >> np.uint64(33)
    state *= _FINAL_2
    state ^= state >> np.uint64(33)
    return state


def _absorb_fixed(state: UInt64s, values: npt.NDArray[np.uint8]) -> None:
    """Absorbs each row of ``values`` as little-endian words, the last one padded with zeros."""
    rows, width = values.shape
    if width in (1, 2, 4, 8):
        _absorb(state, values.view(f"<u{width}").reshape(rows))
        return
    padded = np.zeros((rows, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = values
    for word in padded.view("<u8").T:
        _absorb(state, word)


def _absorb_variable(
    state: UInt64s, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]
) -> None:
    """Absorbs each row's length, then its bytes as words, the last one padded with zeros."""
    lengths = np.diff(offsets)
    _absorb(state, lengths.astype(np.uint64))
    padded = np.zeros(len(data) + 8, np.uint8)
    padded[: len(data)] = data
    words_at = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    # Longest rows first, so that those with a word at this depth are always a prefix.
    order = np.argsort(-lengths, kind="stable")
    left, starts, absorbed = lengths[order], offsets[:-1][order], state[order]
    while len(left) and left[0] > 0:
        active = int(np.searchsorted(-left, 0, side="left"))
        word = words_at[starts[:active]]
        word &= _TAIL_MASKS[np.minimum(left[:active], 8)]
        _absorb(absorbed[:active], word)
        left, starts = left - 8, starts + 8
    state[order] = absorbed


def _absorb(state: UInt64s, word: npt.NDArray[np.unsignedinteger]) -> None:
    state ^= word
    state *= MULTIPLIER
    state ^= state >> np.uint64(32)
