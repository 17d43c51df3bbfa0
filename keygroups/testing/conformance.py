"""The suite that every backend passes, ours and anybody else's.

Subclass it in a test module, name the backend, and say how its files are read *without* it::

    class TestMyBackend(BackendConformance):
        backend = "my-backend"

        def raw_rows(self, path, schema):
            return my_other_reader(path)  # the columns of schema.stored, in the order of the file

Tests are methods for pytest; they use no fixtures and no mocks.
"""
# ruff: noqa: D102 - the name of a test says what it holds

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keygroups.assignment import KeyGroupRange
from keygroups.errors import IncompatibleSnapshot, SnapshotCorrupted
from keygroups.rescale import rescale
from keygroups.snapshot.backend import RowSchema
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.verify import verify
from keygroups.snapshot.writer import write_snapshot
from keygroups.testing.faults import Steps
from keygroups.testing.model import Plain, rows_of, table_of
from keygroups.testing.scratch import reading_in_part, scratch_folder, segment_size
from keygroups.testing.strategies import FLAT_TYPES, KeyedTable, tables

_LIST = pa.list_(pa.int64())
_STRUCT = pa.struct(
    [pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.string()), pa.field("c", _LIST)]
)
NESTED_TYPES: tuple[tuple[pa.DataType, list[Plain]], ...] = (
    (_LIST, [(), (0,), (None, 1), (-1, None, None)]),
    (pa.list_(pa.field("x", pa.string(), nullable=False)), [(), ("",), ("", "é\0")]),
    (pa.list_(_LIST), [(), (None,), ((),), ((None, 1), ())]),
    (_STRUCT, [(0, None, None), (1, "", ()), (-1, "x", (None,))]),
    (pa.list_(_STRUCT), [(), (None,), ((0, None, ()), None)]),
    (pa.map_(pa.string(), pa.float64()), [(), (("", 0),), (("a", 1 << 63), ("b", None))]),
    (pa.map_(pa.int8(), _STRUCT), [(), ((0, None),), ((-1, (0, "", None)),)]),
    (pa.list_(pa.uuid()), [(), (None, b"\0" * 16)]),
    (pa.struct([("t", pa.timestamp("s")), ("d", pa.decimal128(5, 2))]), [(None, None), (-1, 0)]),
)
"""Nested types, each with corner values; a null is added to all of them."""

_NAN, _ODD_NAN = 0x7FF8_0000_0000_0000, 0x7FF0_0000_0000_0001
FALSY_KEYS: tuple[tuple[pa.DataType, list[Plain]], ...] = (
    (pa.bool_(), [False, True]),
    (pa.int8(), [0, -1, -128, 127]),
    (pa.int16(), [0, -1, -(1 << 15)]),
    (pa.int32(), [0, -1, -(1 << 31), (1 << 31) - 1]),
    (pa.int64(), [0, -1, -(1 << 63), (1 << 63) - 1]),
    (pa.float32(), [0, 1 << 31, 0x7FC0_0000, 0xFF80_0000]),
    (pa.float64(), [0, 1 << 63, _NAN, 0x7FF0_0000_0000_0000]),
    (pa.float64(), [_ODD_NAN]),
    (pa.string(), ["", "\0", "\0\0", " ", "é", "𝄞"]),
    (pa.large_string(), ["", "a"]),
    (pa.date32(), [0, -1]),
    (pa.timestamp("us"), [0, -1]),
    (pa.timestamp("s", "UTC"), [0, -1]),
    (pa.decimal128(20, 3), [0, -1, 10**20 - 1]),
)
"""Key types that every scheme takes, with the values that a test of truth would lose."""

OTHER_KEYS: tuple[tuple[str, pa.DataType, list[Plain]], ...] = (
    ("murmur3", pa.binary(), [b"", b"\0", b"\0\0", b"\xff"]),
    ("spark", pa.large_binary(), [b"", b"\0"]),
    ("murmur3", pa.binary(3), [b"\0\0\0", b"\xff\0\0"]),
    ("flink", pa.uuid(), [b"\0" * 16, b"\xff" * 16]),
    ("murmur3", pa.time32("s"), [0, 86_399]),
    ("flink", pa.time64("ns"), [0, 1]),
)


def _examples(share: float = 1.0) -> settings:
    """The profile's number of examples or a share of it, run by several subclasses."""
    return settings(
        settings(),
        max_examples=max(1, int(settings().max_examples * share)),
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )


class BackendConformance:
    """See the module.

    Attributes:
        backend: The name under which the backend is installed.
    """

    backend: ClassVar[str]

    def raw_rows(self, path: Path, schema: RowSchema) -> pa.Table:
        """Reads a segment's file by other means than the backend.

        Returns:
            The columns of ``schema.stored``, rows in the order of the file.
        """
        raise NotImplementedError

    # --- What is written is what is read ---------------------------------------------------

    @_examples()
    @given(tables(), st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 200, 1 << 25]))
    def test_any_table_comes_back(
        self, rows: KeyedTable, max_parallelism: int, parallelism: int, segment_bytes: int
    ) -> None:
        parallelism = min(parallelism, max_parallelism)
        with scratch_folder() as folder, segment_size(self.backend, segment_bytes):
            snapshot = self._write(folder / "s", rows, max_parallelism, parallelism)
            model = rows.model(max_parallelism, parallelism)
            model.expect(snapshot)
            self._check_files(snapshot, model.stored_rows())
            assert verify(folder / "s").findings == ()

    @pytest.mark.parametrize("data_type", FLAT_TYPES, ids=str)
    def test_every_flat_type_holds_null_and_zero(self, data_type: pa.DataType) -> None:
        zero = _zero(data_type)
        self._check_values(data_type, [None, zero, zero, None])

    @pytest.mark.parametrize("data_type", [pa.float16(), pa.float32(), pa.float64()], ids=str)
    def test_floats_keep_every_bit(self, data_type: pa.DataType) -> None:
        exponent = {16: 0x7C00, 32: 0x7F80_0000, 64: 0x7FF0_0000_0000_0000}[data_type.bit_width]
        sign = 1 << (data_type.bit_width - 1)
        self._check_values(data_type, [0, sign, exponent, exponent + 1, sign | exponent | 5])

    @pytest.mark.parametrize(("data_type", "values"), NESTED_TYPES, ids=lambda x: str(x)[:40])
    def test_nested_types(self, data_type: pa.DataType, values: list[Plain]) -> None:
        self._check_values(data_type, [None, *values])

    @pytest.mark.parametrize("scheme", ["flink", "murmur3", "spark"])
    @pytest.mark.parametrize(("data_type", "keys"), FALSY_KEYS, ids=lambda x: str(x)[:40])
    def test_falsy_keys(self, scheme: str, data_type: pa.DataType, keys: list[Plain]) -> None:
        self._check_keys(scheme, data_type, keys)

    @pytest.mark.parametrize(("scheme", "data_type", "keys"), OTHER_KEYS, ids=lambda x: str(x)[:40])
    def test_other_keys(self, scheme: str, data_type: pa.DataType, keys: list[Plain]) -> None:
        self._check_keys(scheme, data_type, keys)

    def test_composite_keys_may_hold_nulls(self) -> None:
        key = (pa.field("a", pa.string()), pa.field("b", pa.int32()), pa.field("c", pa.string()))
        parts = ("", "\0", "\0\0", None)
        keys = [(a, b, c) for a in parts for b in (0, None) for c in parts]
        rows = [(*k, i) for i, k in enumerate(keys)]
        self._check(RowSchema(key, (pa.field("v", pa.int64()),)), rows)

    def test_one_row(self) -> None:
        self._check(_SCHEMA, [(0, "")])

    def test_no_rows(self) -> None:
        with scratch_folder() as folder:
            rows = _keyed(_SCHEMA, [])
            snapshot = self._write(folder / "s", rows, 128, 4)
            rows.model(128, 4).expect(snapshot)
            assert list(snapshot.to_batches()) == []
            assert snapshot.to_table().schema == _SCHEMA.user
            assert verify(folder / "s").findings == ()

    def test_only_keys(self) -> None:
        self._check(RowSchema((pa.field("k", pa.int64(), nullable=False),), ()), [(0,), (1,)])

    # --- Segments --------------------------------------------------------------------------

    def test_a_key_group_too_large_for_a_segment_is_split(self) -> None:
        with scratch_folder() as folder, segment_size(self.backend, 512):
            rows = _numbered(400)
            snapshot = self._write(folder / "s", rows, 1, 1)
            assert len(_segments(snapshot)) >= 5
            rows.model(1).expect(snapshot)
            self._check_files(snapshot, rows.model(1).stored_rows())

    def test_small_key_groups_share_segments_and_are_never_split(self) -> None:
        with scratch_folder() as folder, segment_size(self.backend, 512):
            rows = _numbered(400)
            snapshot = self._write(folder / "s", rows, 256, 2)
            groups = [
                index.key_group.tolist()
                for run in snapshot.manifest.runs
                for index in snapshot.index(run)
            ]
            assert max(map(len, groups)) > 1
            flat = [group for segment in groups for group in segment]
            assert len(flat) == len(set(flat))
            rows.model(256, 2).expect(snapshot)

    def test_the_last_key_group_of_the_largest_max_parallelism(self) -> None:
        rows = _numbered(600)
        model = rows.model(32768, 32768)
        last = max(row[0] for row in model.stored_rows())
        with scratch_folder() as folder:
            snapshot = self._write(folder / "s", rows, 32768, 3)
            names = _SCHEMA.stored.names
            for start in (last, last + 1, 32767):
                key_groups = KeyGroupRange(start, 32767)
                found = rows_of(snapshot.to_table(key_groups, columns=names))
                assert found == model.stored_rows(key_groups)

    # --- Parts -----------------------------------------------------------------------------

    @_examples()
    @given(tables(min_rows=1), st.data(), st.sampled_from([1, 200, 1 << 25]))
    def test_any_columns_of_any_range(
        self, rows: KeyedTable, data: st.DataObject, segment_bytes: int
    ) -> None:
        model = rows.model(16)
        names = rows.schema.stored.names
        with (
            scratch_folder() as folder,
            segment_size(self.backend, segment_bytes),
            reading_in_part(),
        ):
            snapshot = self._write(folder / "s", rows, 16, 1)
            for _ in range(3):
                start, end = sorted(data.draw(st.tuples(st.integers(0, 15), st.integers(0, 15))))
                wanted = data.draw(st.permutations(names))[: data.draw(st.integers(1, len(names)))]
                table = snapshot.to_table(KeyGroupRange(start, end), columns=wanted)
                assert table.column_names == wanted
                places = [names.index(name) for name in wanted]
                expected = model.stored_rows(KeyGroupRange(start, end))
                assert rows_of(table) == [tuple(row[i] for i in places) for row in expected]

    def test_an_empty_range_reads_nothing(self) -> None:
        with scratch_folder() as folder:
            self._write(folder / "s", _numbered(10), 16, 1)
            steps = Steps()
            snapshot = Snapshot.open(folder / "s", observer=steps)
            opened = len(steps)
            assert snapshot.to_table(KeyGroupRange.EMPTY).num_rows == 0
            assert len(steps) == opened

    # --- Digests ---------------------------------------------------------------------------

    @_examples()
    @given(tables(max_rows=15), st.integers(1, 40))
    def test_digests_are_those_of_the_plainest_backend(
        self, rows: KeyedTable, max_parallelism: int
    ) -> None:
        with scratch_folder() as folder:
            ours = self._write(folder / "a", rows, max_parallelism, 1)
            plainest = self._write(folder / "b", rows, max_parallelism, 1, "memory")
            assert ours.key_group_sizes().equals(plainest.key_group_sizes())
            assert ours.to_table().schema == plainest.to_table().schema

    @_examples(0.3)
    @given(tables(max_rows=15), st.integers(1, 40), st.integers(1, 40))
    def test_what_is_read_can_be_written_again(
        self, rows: KeyedTable, max_parallelism: int, other: int
    ) -> None:
        with scratch_folder() as folder:
            first = self._write(folder / "a", rows, max_parallelism, 1)
            rescale(folder / "a", folder / "b", max_parallelism=other, jobs=1)
            again = rescale(folder / "b", folder / "c", max_parallelism=max_parallelism, jobs=1)
            rows.model(max_parallelism).expect(again)
            assert again.key_group_sizes().equals(first.key_group_sizes())

    # --- Damage ----------------------------------------------------------------------------

    def test_a_damaged_byte_is_refused_or_harmless_in_every_kind_of_read(self) -> None:
        rows = _numbered(60)
        with scratch_folder() as folder, reading_in_part():
            snapshot = self._write(folder / "s", rows, 8, 1)
            reads: list[Callable[[], pa.Table]] = [
                lambda: snapshot.to_table(columns=_SCHEMA.stored.names),
                lambda: snapshot.to_table(KeyGroupRange(2, 5), columns=_SCHEMA.stored.names),
                lambda: snapshot.to_table(columns=["v"]),
                lambda: snapshot.to_table(KeyGroupRange(7, 7), columns=["k"]),
            ]
            expected = [rows_of(read()) for read in reads]
            (path,) = _segments(snapshot)
            refused = [0] * len(reads)
            for damaged in _with_one_byte_changed(path):
                for i, read in enumerate(reads):
                    try:
                        assert rows_of(read()) == expected[i], damaged
                    except (SnapshotCorrupted, IncompatibleSnapshot):
                        refused[i] += 1
            assert refused[0] == path.stat().st_size  # the whole file is under its digest
            assert all(refused)
            assert [rows_of(read()) for read in reads] == expected

    @_examples()
    @given(cut=st.integers(1, 100), added=st.binary(min_size=1, max_size=20))
    def test_a_file_of_another_length_is_refused(self, cut: int, added: bytes) -> None:
        with scratch_folder() as folder:
            snapshot = self._write(folder / "s", _numbered(20), 8, 1)
            (path,) = _segments(snapshot)
            whole = path.read_bytes()
            for data in (whole[: len(whole) * (cut - 1) // 100], whole + added):
                path.write_bytes(data)
                for key_groups in (None, KeyGroupRange(0, 3)):
                    with pytest.raises(SnapshotCorrupted, match=str(len(whole))):
                        snapshot.to_table(key_groups)

    # --- Helpers ---------------------------------------------------------------------------

    def _write(
        self,
        path: Path,
        rows: KeyedTable,
        max_parallelism: int,
        parallelism: int,
        backend: str | None = None,
    ) -> Snapshot:
        return write_snapshot(
            path,
            rows.table,
            key=rows.key,
            max_parallelism=max_parallelism,
            parallelism=parallelism,
            backend=self.backend if backend is None else backend,
            scheme=rows.scheme,
        )

    def _check_values(self, data_type: pa.DataType, values: list[Plain]) -> None:
        key = (pa.field("k", pa.int64(), nullable=False),)
        self._check(RowSchema(key, (pa.field("v", data_type),)), list(enumerate(values)))

    def _check_keys(self, scheme: str, data_type: pa.DataType, keys: list[Plain]) -> None:
        schema = RowSchema(
            (pa.field("k", data_type, nullable=False),), (pa.field("v", pa.int64()),)
        )
        self._check(schema, [(key, i) for i, key in enumerate(keys)], scheme)

    def _check(
        self, schema: RowSchema, rows: Sequence[tuple[Plain, ...]], scheme: str = "flink"
    ) -> None:
        table = _keyed(schema, rows, scheme)
        with scratch_folder() as folder:
            snapshot = self._write(folder / "s", table, 16, 2)
            table.model(16, 2).expect(snapshot)
            self._check_files(snapshot, table.model(16, 2).stored_rows())
            assert verify(folder / "s").findings == ()

    def _check_files(self, snapshot: Snapshot, expected: list[tuple[Plain, ...]]) -> None:
        """Compares the files with the rows, read without the backend."""
        schema = snapshot.schema()
        tables = [self.raw_rows(path, schema) for path in _segments(snapshot)]
        for table in tables:
            assert table.schema.names == schema.stored.names
        assert [row for table in tables for row in rows_of(table)] == expected


_SCHEMA = RowSchema((pa.field("k", pa.int64(), nullable=False),), (pa.field("v", pa.string()),))


def _keyed(
    schema: RowSchema, rows: Sequence[tuple[Plain, ...]], scheme: str = "flink"
) -> KeyedTable:
    names = tuple(field.name for field in schema.key)
    return KeyedTable(table_of(rows, schema.user), names, scheme, tuple(rows), schema)


def _numbered(count: int) -> KeyedTable:
    return _keyed(_SCHEMA, [(i, f"value {i}") for i in range(count)])


def _segments(snapshot: Snapshot) -> list[Path]:
    """The files of a snapshot's segments, in order of its runs."""
    runs = sorted(snapshot.manifest.runs, key=lambda run: run.key_groups)
    return [snapshot.storage.root / s.file.path for run in runs for s in run.segments]


def _with_one_byte_changed(path: Path) -> Iterator[str]:
    """Changes each byte of a file in turn, in one bit, and puts it back."""
    size = path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        for position in range(size):
            original = os.pread(file.fileno(), 1, position)
            changed = bytes([original[0] ^ (1 << (position % 8))])
            os.pwrite(file.fileno(), changed, position)
            try:
                yield f"byte {position} of {size}: {original.hex()} became {changed.hex()}"
            finally:
                os.pwrite(file.fileno(), original, position)


def _zero(data_type: pa.DataType) -> Plain:
    """The zero of a type, empty if it has a length."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _zero(data_type.storage_type)
    if pa.types.is_fixed_size_binary(data_type) and not pa.types.is_decimal(data_type):
        return bytes(data_type.byte_width)
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return ""
    if pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type):
        return b""
    return False if pa.types.is_boolean(data_type) else 0
