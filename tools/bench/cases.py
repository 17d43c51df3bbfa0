"""What is measured: groups of comparisons, each made for a number of rows."""

from __future__ import annotations

import io
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mmh3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import rocksdict
from harness import Comparison

import keygroups as kg
from keygroups.backends.sst import read_sst, write_sst

LOOP_ROWS = 20_000  # a loop in Python is linear: a few rows tell its rate


def hashing(rows: int) -> Iterator[Comparison]:
    """Keys to key groups."""
    numbers = np.random.default_rng(1).integers(-(2**62), 2**62, rows)
    out, keys = np.empty_like(numbers), pa.array(numbers)
    few = numbers[:LOOP_ROWS].tolist()

    def loop() -> None:
        for value in few:
            code = (value ^ (value >> 32)) & 0xFFFFFFFF
            abs(mmh3.hash(struct.pack("<I", code), 0)) % 128

    def groups_of(array: pa.Array) -> Callable[[], object]:
        return lambda: kg.assign_key_groups(array, 128)

    yield Comparison("int64", groups_of(keys), "np.copyto", lambda: np.copyto(out, numbers), rows)
    yield Comparison("int64", groups_of(keys), "mmh3 loop", loop, rows, LOOP_ROWS)
    for length in (8, 16, 64):
        texts = pa.array([f"{i:0{length}d}" for i in numbers[: min(rows, 500_000)] % 10**8])
        some = texts[:2000].to_pylist()
        yield Comparison(
            f"string, {length} ASCII characters",
            groups_of(texts),
            "Python loop",
            lambda some=some: [_java_group(text) for text in some],
            len(texts),
            len(some),
        )


def _java_group(text: str) -> int:
    code = 0
    for character in text:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    return abs(mmh3.hash(struct.pack("<I", code), 0)) % 128


def sst(rows: int) -> Iterator[Comparison]:
    """SST files of sorted rows: 16-byte keys, 64-byte values."""
    folder = tempfile.TemporaryDirectory()
    keys, values, fixed, variable = _sorted_entries(rows)
    few = min(rows, 200_000)

    def ours(entries: pa.LargeBinaryArray) -> None:
        with Path(folder.name, "ours.sst").open("wb", buffering=0) as sink:
            write_sst(sink, keys, entries)
            os.fdatasync(sink.fileno())

    def rocks(entries: pa.LargeBinaryArray) -> None:
        path = str(Path(folder.name, "rocks.sst"))
        writer = rocksdict.SstFileWriter(options=rocksdict.Options(raw_mode=True))
        writer.open(path)
        for key, value in zip(keys[:few].to_pylist(), entries[:few].to_pylist(), strict=True):
            writer[key] = value
        writer.finish()

    def raw() -> None:
        with Path(folder.name, "raw").open("wb", buffering=0) as sink:
            sink.write(values)
            sink.write(values[: rows * 16])
            os.fdatasync(sink.fileno())

    yield Comparison("write, fixed width", lambda: ours(fixed), "raw write", raw, rows)
    for name, entries in (("fixed width", fixed), ("variable width", variable)):
        yield Comparison(
            f"write, {name}",
            lambda entries=entries: ours(entries),
            "rocksdict SstFileWriter",
            lambda entries=entries: rocks(entries),
            rows,
            few,
        )
    sink = io.BytesIO()
    write_sst(sink, keys, fixed)
    data = sink.getvalue()
    copy = np.empty(len(data), np.uint8)
    yield Comparison(
        "read, fixed width",
        lambda: read_sst(data),
        "memcpy",
        lambda: np.copyto(copy, np.frombuffer(data, np.uint8)),
        rows,
    )


def _sorted_entries(
    rows: int,
) -> tuple[pa.LargeBinaryArray, bytes, pa.LargeBinaryArray, pa.LargeBinaryArray]:
    rng = np.random.default_rng(2)
    numbers = np.sort(rng.choice(2**40, rows, replace=False)).astype(">u8")
    padded = np.zeros((rows, 16), np.uint8)
    padded[:, 8:] = numbers.view(np.uint8).reshape(rows, 8)
    values = rng.bytes(rows * 64)
    keys = pa.array(padded.view("V16").reshape(-1).tolist(), pa.large_binary())
    offsets = np.arange(rows + 1, dtype=np.int64) * 64
    fixed = pa.Array.from_buffers(
        pa.large_binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    )
    ends = np.cumsum(rng.integers(30, 98, rows)) * 64 // 65
    offsets = np.concatenate(([0], np.minimum(ends, rows * 64))).astype(np.int64)
    variable = pa.Array.from_buffers(
        pa.large_binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    )
    return keys, values, fixed, variable


def table_of(rows: int, value_bytes: int = 64) -> pa.Table:
    """Unsorted rows: distinct int64 keys and values of random bytes."""
    rng = np.random.default_rng(3)
    data = pa.py_buffer(rng.bytes(rows * value_bytes))
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * value_bytes)
    values = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, data])
    return pa.table({"key": rng.permutation(rows * 3)[:rows], "value": values})


def snapshot(rows: int) -> Iterator[Comparison]:
    """An unsorted table to a durable snapshot, and back to Arrow."""
    folder = tempfile.TemporaryDirectory()
    table = table_of(rows)

    def write(backend: str) -> None:
        path = Path(folder.name, backend)
        shutil.rmtree(path, ignore_errors=True)
        kg.write_snapshot(path, table, key="key", parallelism=4, backend=backend)

    def plain() -> None:
        pq.write_table(table, Path(folder.name, "plain.parquet"))
        with Path(folder.name, "plain.parquet").open() as file:
            os.fdatasync(file.fileno())

    for backend in ("parquet", "rocksdb"):
        yield Comparison(
            f"write, {backend}",
            lambda backend=backend: write(backend),
            "pq.write_table, unsorted",
            plain,
            rows,
        )
        yield Comparison(
            f"read, {backend}",
            lambda backend=backend: _drain(Path(folder.name, backend)),
            "pq.read_table",
            lambda: pq.read_table(Path(folder.name, "plain.parquet")),
            rows,
        )


def _drain(path: Path) -> None:
    for _ in kg.Snapshot.open(path).to_batches():
        pass


def rescale(rows: int) -> Iterator[Comparison]:
    """4 ranges to 6, by links, by rewriting, and to another max parallelism."""
    folder = tempfile.TemporaryDirectory()
    table = table_of(rows)

    def to(source: Path, name: str, **arguments: object) -> None:
        target = Path(folder.name, name)
        shutil.rmtree(target, ignore_errors=True)
        kg.rescale(source, target, **arguments)

    def copy(source: Path) -> None:
        target = Path(folder.name, "copy")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        for path in target.rglob("*.*"):
            with path.open() as file:
                os.fdatasync(file.fileno())

    for backend in ("parquet", "rocksdb"):
        source = Path(folder.name, f"{backend}-source")
        kg.write_snapshot(source, table, key="key", parallelism=4, backend=backend)
        for name, arguments in (
            ("link", {"parallelism": 6, "mode": "link"}),
            ("rewrite", {"parallelism": 6}),
            ("max parallelism 4096", {"max_parallelism": 4096}),
        ):
            yield Comparison(
                f"{name}, {backend}",
                lambda source=source, arguments=arguments: to(source, "target", **arguments),
                "copy and fsync",
                lambda source=source: copy(source),
                rows,
            )


GROUPS: dict[str, Callable[[int], Iterator[Comparison]]] = {
    "hashing": hashing,
    "sst": sst,
    "snapshot": snapshot,
    "rescale": rescale,
}
