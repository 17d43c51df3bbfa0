"""RocksDB table files written and read without RocksDB, with RocksDB as the judge."""

from __future__ import annotations

import io
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import rocksdict
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keygroups.backends import sst_blocks, sst_columns, sst_format, sst_table, sst_writer
from keygroups.backends.sst import SstReader, read_sst, write_sst
from keygroups.errors import IncompatibleSnapshot, InvalidArgument, SnapshotCorrupted

BAD_FILE = (SnapshotCorrupted, IncompatibleSnapshot)
Entries = dict[bytes, bytes]

any_entries = st.dictionaries(
    st.binary(min_size=1, max_size=20), st.binary(max_size=200), min_size=1, max_size=150
)
# Few distinct bytes: long shared prefixes, and keys that are prefixes of others.
similar_entries = st.dictionaries(
    st.lists(st.sampled_from(b"\x00\x01a\xff"), min_size=1, max_size=12).map(bytes),
    st.binary(max_size=3),
    min_size=1,
    max_size=150,
)
block_sizes = st.sampled_from([1, 40, 300, 4096, 65536])


@st.composite
def fixed_entries(draw: st.DrawFn) -> Entries:
    """Keys of one width and values of one width, on both sides of the varint borders."""
    rows = draw(st.integers(1, 300))
    width = draw(st.sampled_from([2, 3, 8, 16, 119, 120, 200]))
    value = draw(st.binary(min_size=1, max_size=5))
    size = draw(st.sampled_from([0, 1, 7, 64, 127, 128, 300]))
    step = draw(st.integers(1, 60000 // rows))
    return {
        (i * step).to_bytes(2, "big").rjust(width, b"k"): (value * size)[: max(0, size - 1)]
        + bytes([i % 251])[: min(1, size)]
        for i in range(rows)
    }


all_entries = st.one_of(any_entries, similar_entries, fixed_entries())


def columns(entries: Entries) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
    keys = sorted(entries)
    return (
        pa.array(keys, pa.large_binary()),
        pa.array([entries[key] for key in keys], pa.large_binary()),
    )


def table_of(entries: Entries, block_size_bytes: int = 65536) -> bytes:
    sink = io.BytesIO()
    write_sst(sink, *columns(entries), block_size_bytes=block_size_bytes)
    return sink.getvalue()


def general_table_of(entries: Entries, block_size_bytes: int) -> bytes:
    """The table as the general encoder writes it, whatever the widths."""
    sink = io.BytesIO()
    rows = sst_table.Rows.of(*columns(entries))
    table = sst_table.Table(sink, rows)
    sst_writer._write_variable(table, rows, block_size_bytes)
    table.finish()
    return sink.getvalue()


def entries_of(data: bytes, lower: bytes | None = None, upper: bytes | None = None) -> Entries:
    keys, values = read_sst(data, lower=lower, upper=upper)
    keys.validate(full=True)
    values.validate(full=True)
    assert keys.to_pylist() == sorted(set(keys.to_pylist()))
    return dict(zip(keys.to_pylist(), values.to_pylist(), strict=True))


def within(entries: Entries, lower: bytes | None, upper: bytes | None) -> Entries:
    return {
        key: value
        for key, value in entries.items()
        if (lower is None or key >= lower) and (upper is None or key < upper)
    }


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One folder for all examples of a property: each makes and removes its own below it."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path, ignore_errors=True)


def options(*, format_version: int = 2, block_size: int = 4096) -> rocksdict.Options:
    result = rocksdict.Options(raw_mode=True)
    result.set_compression_type(rocksdict.DBCompressionType.none())
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_format_version(format_version)
    blocks.set_block_size(block_size)
    result.set_block_based_table_factory(blocks)
    return result


def rocksdb_table_of(folder: Path, entries: Entries, **table: int) -> bytes:
    """The table that RocksDB's own writer makes."""
    path = folder / "theirs.sst"
    writer = rocksdict.SstFileWriter(options=options(**table))
    writer.open(str(path))
    for key in sorted(entries):
        writer[key] = entries[key]
    writer.finish()
    return path.read_bytes()


def in_rocksdb(folder: Path, data: bytes, probes: list[bytes]) -> tuple[Entries, list[object]]:
    """What a fresh database holds after ingestion of the file, by iteration and by lookup."""
    place = Path(tempfile.mkdtemp(dir=folder))
    file = place / "ours.sst"
    file.write_bytes(data)
    db = rocksdict.Rdict(str(place / "db"), options=options())
    try:
        db.ingest_external_file([str(file)])
        found: Entries = {}
        it = db.iter()
        it.seek_to_first()
        while it.valid():
            found[it.key()] = it.value()
            it.next()
        it.status()  # items() would stop silently at a damaged block
        del it
        return found, [db.get(probe) for probe in probes]
    finally:
        db.close()
        shutil.rmtree(place)


# RocksDB reads what we write.


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(entries=all_entries, block_size=block_sizes, absent=st.lists(st.binary(min_size=1)))
def test_rocksdb_ingests_what_we_write(
    folder: Path, entries: Entries, block_size: int, absent: list[bytes]
) -> None:
    probes = [*entries, *absent]
    found, values = in_rocksdb(folder, table_of(entries, block_size), probes)
    assert found == entries
    assert values == [entries.get(probe) for probe in probes]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(entries=all_entries)
def test_our_file_and_that_of_rocksdb_make_the_same_database(
    folder: Path, entries: Entries
) -> None:
    ours, _ = in_rocksdb(folder, table_of(entries), [])
    theirs, _ = in_rocksdb(folder, rocksdb_table_of(folder, entries), [])
    assert ours == theirs == entries


def test_rocksdb_ingests_a_file_of_many_chunks(folder: Path) -> None:
    """More rows and bytes than one chunk of either encoder, and an entry larger than both."""
    entries = {struct.pack(">Q", i): b"%d" % i * (1 + i % 7) for i in range(70_000)}
    fixed = dict.fromkeys(entries, b"v" * 40)
    entries[struct.pack(">Q", 100) + b"big"] = b"B" * (9 << 20)
    for case in (entries, fixed):
        found, _ = in_rocksdb(folder, table_of(case), [])
        assert found == case
        assert entries_of(table_of(case)) == case


# We read what we and RocksDB write.


@settings(max_examples=150, deadline=None)
@given(
    entries=all_entries,
    block_size=block_sizes,
    lower=st.none() | st.binary(max_size=4),
    upper=st.none() | st.binary(max_size=4),
)
@example(entries={b"a": b"", b"b": b""}, block_size=1, lower=b"", upper=b"")
@example(entries={b"\xff" * 9: b"x"}, block_size=1, lower=b"\xff" * 10, upper=None)
def test_reader_returns_what_was_written(
    entries: Entries, block_size: int, lower: bytes | None, upper: bytes | None
) -> None:
    data = table_of(entries, block_size)
    assert entries_of(data) == entries
    assert entries_of(data, lower, upper) == within(entries, lower, upper)
    some = sorted(entries)[len(entries) // 2]
    assert entries_of(data, some) == within(entries, some, None)
    assert entries_of(data, None, some) == within(entries, None, some)


@pytest.mark.parametrize("format_version", [2, 3, 4, 5, 6])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(entries=all_entries, block_size=block_sizes, bounds=st.tuples(*[st.binary(max_size=3)] * 2))
def test_reader_reads_files_of_rocksdb(
    folder: Path,
    format_version: int,
    entries: Entries,
    block_size: int,
    bounds: tuple[bytes, bytes],
) -> None:
    data = rocksdb_table_of(folder, entries, format_version=format_version, block_size=block_size)
    assert entries_of(data) == entries
    assert entries_of(data, *bounds) == within(entries, *bounds)
    assert SstReader(Counting(data)).entry_count == len(entries)


def test_compressed_files_are_incompatible(folder: Path) -> None:
    path = folder / "compressed.sst"
    compressing = options()
    compressing.set_compression_type(rocksdict.DBCompressionType.zstd())
    writer = rocksdict.SstFileWriter(options=compressing)
    writer.open(str(path))
    for i in range(1000):
        writer[b"%05d" % i] = b"same" * 10
    writer.finish()
    with pytest.raises(IncompatibleSnapshot, match="compression type 7"):
        read_sst(path.read_bytes())


def test_tombstones_are_incompatible(folder: Path) -> None:
    path = folder / "deleted.sst"
    writer = rocksdict.SstFileWriter(options=options())
    writer.open(str(path))
    writer[b"a"] = b"1"
    del writer[b"b"]
    writer.finish()
    with pytest.raises(IncompatibleSnapshot, match=r"deleted\.keys = 1"):
        read_sst(path.read_bytes())


# The two encoders, and limits of the writer.


@settings(max_examples=150, deadline=None)
@given(entries=fixed_entries(), block_size=block_sizes)
def test_fast_path_equals_general_path(entries: Entries, block_size: int) -> None:
    assert table_of(entries, block_size) == general_table_of(entries, block_size)


@pytest.mark.parametrize("value_size", [0, 40, 3000])
def test_fast_path_equals_general_path_over_many_chunks(value_size: int) -> None:
    entries = {
        struct.pack(">Q", i): b"v" * value_size for i in range(70_000 // (1 + value_size // 99))
    }
    assert table_of(entries) == general_table_of(entries, 65536)


@given(entries=all_entries, block_size=block_sizes)
@settings(max_examples=50, deadline=None)
def test_blocks_do_not_exceed_their_size_by_more_than_their_restarts(
    entries: Entries, block_size: int
) -> None:
    index = SstReader(Counting(table_of(entries, block_size)))._index
    largest = max(len(key) + len(value) + 12 for key, value in entries.items())
    bodies = index.sizes - 4 - 4 * -(-index.sizes // (16 * 12))
    assert bodies.max() <= max(block_size, largest)


def test_slices_of_columns_are_written_alone() -> None:
    entries = {b"%04d" % i: b"x" * (i % 3) for i in range(1000)}
    keys, values = columns(entries)
    for some in (values, pa.array([b"same"] * 1000, pa.large_binary())):
        sink = io.BytesIO()
        write_sst(sink, keys.slice(100, 50), some.slice(100, 50), block_size_bytes=200)
        assert entries_of(sink.getvalue()) == dict(
            zip(keys.to_pylist()[100:150], some.to_pylist()[100:150], strict=True)
        )


def large(*values: bytes | None) -> pa.LargeBinaryArray:
    return pa.array(values, pa.large_binary())


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (large(), large(), "no entries"),
        (large(b"a"), large(b"1", b"2"), "1 keys and 2 values"),
        (large(b"a", None), large(b"1", b"2"), "keys has 1 nulls"),
        (large(b"a"), large(None), "values has 1 nulls"),
        (pa.array([b"a"]), large(b"1"), "keys is BinaryArray"),
        (large(b""), large(b"1"), "non-empty"),
        (large(b"b", b"a"), large(b"1", b"2"), "not greater than b'b'"),
        (large(b"a", b"a"), large(b"1", b"22"), "not greater than b'a'"),
    ],
)
@pytest.mark.parametrize("block_size", [1, 65536])
def test_writer_refuses(keys: pa.Array, values: pa.Array, message: str, block_size: int) -> None:
    with pytest.raises(InvalidArgument, match=message):
        write_sst(io.BytesIO(), keys, values, block_size_bytes=block_size)


@pytest.mark.parametrize("block_size", [0, -1, (1 << 28) + 1])
def test_writer_refuses_block_size(block_size: int) -> None:
    with pytest.raises(InvalidArgument, match="block_size_bytes"):
        write_sst(io.BytesIO(), large(b"a"), large(b"1"), block_size_bytes=block_size)


# Damage.

SMALL: list[Entries] = [
    {b"k%d" % i: b"v" * i for i in range(9)},
    {b"k%02d" % i: b"same" for i in range(20)},
]


def must_not_lie(data: bytes, entries: Entries) -> None:
    try:
        found = entries_of(data)
    except BAD_FILE:
        return
    assert found == entries


@pytest.mark.parametrize("entries", SMALL)
def test_every_bit_flip_is_detected_or_harmless(entries: Entries) -> None:
    data = bytearray(table_of(entries, 60))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        must_not_lie(bytes(data), entries)
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("format_version", [2, 5, 6])
def test_every_bit_flip_in_a_file_of_rocksdb_is_detected_or_harmless(
    folder: Path, format_version: int
) -> None:
    entries = SMALL[0]
    data = bytearray(rocksdb_table_of(folder, entries, format_version=format_version))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        must_not_lie(bytes(data), entries)
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("entries", SMALL)
def test_every_truncation_is_detected(entries: Entries) -> None:
    data = table_of(entries, 60)
    for size in range(len(data)):
        with pytest.raises(BAD_FILE):
            read_sst(data[:size])
        with pytest.raises(BAD_FILE):
            read_sst(data[size + 1 :])


def test_a_source_that_gives_less_than_asked_is_truncated() -> None:
    data = table_of(SMALL[0])
    source = Counting(data)
    reader = SstReader(source)
    source.data = data[:20]
    with pytest.raises(SnapshotCorrupted, match="truncated"):
        reader.read()


@settings(max_examples=300, deadline=None)
@given(noise=st.binary(max_size=300), version=st.integers(0, 7), kind=st.integers(0, 5))
def test_random_bytes_never_raise_anything_else(noise: bytes, version: int, kind: int) -> None:
    footer = struct.pack("<IQ", version, sst_format.MAGIC)
    for data in (noise, noise + footer, noise[:-42] + bytes([kind]) + noise[-40:] + footer):
        with pytest.raises(BAD_FILE):
            read_sst(data)


def handles_of(data: bytes) -> list[sst_format.BlockHandle]:
    """All blocks of a file."""
    reader = SstReader(Counting(data))
    footer = reader._footer
    meta = dict(reader._meta_entries(footer.metaindex, "metaindex"))
    index = reader._index
    blocks = [
        sst_format.BlockHandle(offset, size)
        for offset, size in zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    ]
    assert footer.index is not None
    properties = sst_format.decode_handle(meta[sst_format.PROPERTIES_BLOCK], "properties")
    return [*blocks, properties, footer.index, footer.metaindex]


def hostile(data: bytes, handle: sst_format.BlockHandle, block: bytes) -> bytes:
    """The file with other contents of one block and the checksum that fits them."""
    assert len(block) == handle.size
    end = handle.offset + handle.size + sst_format.BLOCK_TRAILER_BYTES
    return data[: handle.offset] + sst_format.seal(block) + data[end:]


@pytest.mark.parametrize("entries", SMALL)
@pytest.mark.parametrize("format_version", [0, 2, 5])
def test_bit_flips_with_fitting_checksums_never_raise_anything_else(
    folder: Path, entries: Entries, format_version: int
) -> None:
    """A checksum does not stop a hostile file: no length in a block may be trusted."""
    data = table_of(entries, 60)
    handles = handles_of(data)
    if format_version:
        data = reseal(rocksdb_table_of(folder, entries, format_version=format_version))
        assert entries_of(data) == entries
        handles = handles_of(data)
        del handles[-3]  # their properties are long and no different from ours
    for handle in handles:
        block = bytearray(data[handle.offset : handle.offset + handle.size])
        for bit in range(8 * len(block)):
            block[bit // 8] ^= 1 << bit % 8
            survives(hostile(data, handle, bytes(block)))
            block[bit // 8] ^= 1 << bit % 8


def reseal(data: bytes) -> bytes:
    """A version 2 file of RocksDB with the checksums that :func:`hostile` makes."""
    for handle in handles_of(data):
        data = hostile(data, handle, data[handle.offset : handle.offset + handle.size])
    footer = len(data) - sst_format.FOOTER_BYTES
    return data[:footer] + bytes([sst_format.CHECKSUM_XXH64]) + data[footer + 1 :]


def survives(data: bytes) -> None:
    try:
        keys, values = read_sst(data)
    except BAD_FILE:
        return
    keys.validate(full=True)
    values.validate(full=True)


@settings(max_examples=300, deadline=None)
@given(entries=all_entries, data=st.data())
def test_random_blocks_with_fitting_checksums_never_raise_anything_else(
    entries: Entries, data: st.DataObject
) -> None:
    table = table_of(entries, 300)
    handle = data.draw(st.sampled_from(handles_of(table)))
    block = bytearray(table[handle.offset : handle.offset + handle.size])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(block) - 1))
        noise = data.draw(
            st.sampled_from([b"\xff" * 4, b"\x80" * 9, b"\0"]) | st.binary(max_size=9)
        )
        block[at : at + len(noise)] = noise[: len(block) - at]
    survives(hostile(table, handle, bytes(block)))


def test_a_forged_restart_interval_costs_no_time() -> None:
    count = sst_blocks.MAX_RESTART_INTERVAL + 2
    entry = b"\0\x08\0" + sst_format.KEY_TRAILER
    mixed = entry * count + b"\0\x08\1" + sst_format.KEY_TRAILER + b"v"
    block = mixed + struct.pack("<II", 0, 1)
    room = sst_columns.Columns(rows=len(block), key_bytes=len(block), value_bytes=len(block))
    data = np.frombuffer(block + bytes(5), np.uint8)
    with pytest.raises(IncompatibleSnapshot, match="between restart points"):
        sst_blocks.decode_blocks(data, 0, np.array([0]), np.array([len(block)]), room)


def test_messages_tell_offset_and_numbers() -> None:
    data = bytearray(table_of(SMALL[0], 60))
    handle = handles_of(bytes(data))[1]
    data[handle.offset + 3] ^= 1
    with pytest.raises(SnapshotCorrupted, match=f"offset {handle.offset} of {handle.size} bytes"):
        read_sst(data)


# Bytes read.


class Counting:
    """A file in memory that counts what is read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, length: int, /) -> bytes:
        self.reads.append((offset, length))
        return self.data[offset : offset + length]


@settings(max_examples=50, deadline=None)
@given(
    entries=all_entries,
    block_size=block_sizes,
    lower=st.none() | st.binary(max_size=3),
    upper=st.none() | st.binary(max_size=3),
)
def test_bounded_reads_fetch_only_the_blocks_needed(
    entries: Entries, block_size: int, lower: bytes | None, upper: bytes | None
) -> None:
    data = table_of(entries, block_size)
    source = Counting(data)
    reader = SstReader(source)
    handles = handles_of(data)
    data_end = handles[-3].offset
    assert sum(length for _, length in source.reads) == len(data) - data_end
    source.reads.clear()
    keys, _ = reader.read(lower, upper)
    needed = 0
    # A block can hold wanted keys if its last key reaches `lower` and the last key of the
    # block before it is below `upper`.
    before: bytes | None = None
    for block, handle in enumerate(handles[:-3]):
        last = reader._index._key(block)
        reaches = lower is None or last >= lower
        starts = upper is None or before is None or before < upper
        if reaches and starts:
            needed += handle.size + sst_format.BLOCK_TRAILER_BYTES
        before = last
    assert sum(length for _, length in source.reads) <= needed
    assert keys.to_pylist() == sorted(within(entries, lower, upper))


def test_files_are_deterministic() -> None:
    assert table_of(SMALL[0]) == table_of(SMALL[0])


def test_reader_shows_its_size() -> None:
    assert repr(SstReader(Counting(table_of(SMALL[0], 60)))) == "SstReader(9 entries, 3 blocks)"
