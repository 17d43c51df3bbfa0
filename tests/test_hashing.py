"""Keys to hashes to key groups, held to Flink, the JDK, mmh3 and plain Python."""

import csv
import datetime as dt
import decimal
import gzip
import json
import struct
import uuid
from collections import defaultdict
from pathlib import Path

import mmh3
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keygroups.assignment import subtask_for_key_group
from keygroups.errors import InvalidArgument
from keygroups.hashing import (
    SCHEMES,
    assign_key_groups,
    assign_to_key_group,
    check_key_type,
    check_scheme,
    hash_keys,
    key_groups_of_hashes,
    murmur3,
)
from keygroups.keys import encode_keys

GOLDEN = Path(__file__).parent / "golden"
WORD = 0xFFFFFFFF


def rows_of(path):
    with gzip.open(path, "rt", encoding="ascii", newline="") as lines:
        yield from csv.DictReader(lines)


# --- Building columns from values, nulls and odd bits included -------------------------------


def column(type_, values):
    """An array of ``values``: strings may hold lone surrogates, times and decimals are integers."""
    mask = np.array([value is None for value in values], bool)
    t = pa.types
    if t.is_null(type_):
        return pa.nulls(len(values))
    if t.is_struct(type_):
        columns = [
            column(field.type, [None if v is None else v[i] for v in values])
            for i, field in enumerate(type_)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(type_), mask=pa.array(mask))
    if type_ in (pa.string(), pa.large_string()):
        raw = [None if v is None else v.encode("utf-8", "surrogatepass") for v in values]
        binary = pa.binary() if type_ == pa.string() else pa.large_binary()
        return pa.array(raw, binary).view(type_)
    if type_ == pa.string_view():
        raw = [None if v is None else v.encode("utf-8", "surrogatepass") for v in values]
        return pa.array(raw, pa.binary_view()).view(type_)
    if t.is_decimal(type_):
        data = b"".join((v or 0).to_bytes(16, "little", signed=True) for v in values)
        valid = pa.array(~mask).buffers()[1]
        return pa.Array.from_buffers(type_, len(values), [valid, pa.py_buffer(data)])
    if t.is_temporal(type_):
        storage = pa.int32() if type_.bit_width == 32 else pa.int64()
        return pa.array(values, storage).view(type_)
    if isinstance(type_, pa.UuidType):
        return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))
    return pa.array(values, type_)


# --- The same hashes, one value at a time, in plain Python -----------------------------------


def signed(word):
    return (word & WORD) - ((word & 0x80000000) << 1)


def java_long(value):
    return signed(value ^ (value & 0xFFFFFFFFFFFFFFFF) >> 32)


def fold(values, start=0):
    h = start
    for value in values:
        h = 31 * h + value & WORD
    return signed(h)


def big_integer(value):
    words = abs(value).to_bytes(16, "big")
    h = fold(struct.unpack(">4I", words))
    return signed(-h if value < 0 else h)


def local_date(days):
    date = dt.date(1970, 1, 1) + dt.timedelta(days)
    return signed((date.year & 0xFFFFF800) ^ ((date.year << 11) + (date.month << 6) + date.day))


UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def java_hash(type_, value):
    t = pa.types
    if value is None:
        return 0
    if t.is_boolean(type_):
        return 1231 if value else 1237
    if t.is_integer(type_):
        return java_long(value) if type_ == pa.int64() else value
    if t.is_float32(type_):
        return struct.unpack("<i", struct.pack("<f", value if value == value else np.nan))[0]
    if t.is_float64(type_):
        bits = struct.unpack("<q", struct.pack("<d", value if value == value else np.nan))[0]
        return java_long(bits)
    if t.is_struct(type_):
        return fold(java_hash(f.type, v) for f, v in zip(type_, value, strict=True))
    if t.is_decimal(type_):
        return signed(31 * big_integer(value) + type_.scale)
    if t.is_date32(type_):
        return local_date(value)
    if t.is_time(type_):
        return java_long(value * (10**9 // UNITS[type_.unit]))
    if t.is_timestamp(type_):
        seconds, ticks = divmod(value, UNITS[type_.unit])
        nanos = ticks * (10**9 // UNITS[type_.unit])
        if type_.tz is not None:
            return signed(java_long(seconds) + 51 * nanos)
        days, second = divmod(seconds, 86_400)
        return local_date(days) ^ java_long(second * 10**9 + nanos)
    if isinstance(type_, pa.UuidType):
        high, low = struct.unpack(">qq", value)
        return java_long(high ^ low)
    return fold(struct.unpack(f"<{len(u16(value)) // 2}H", u16(value)))


def u16(text):
    return text.encode("utf-16-le", "surrogatepass")


def spark_mix(h, word):
    word = word * 0xCC9E2D51 & WORD
    word = (word << 15 | word >> 17) * 0x1B873593 & WORD
    h ^= word
    h = (h << 13 | h >> 19) & WORD
    return h * 5 + 0xE6546B64 & WORD


def spark_finish(h, length):
    h ^= length
    h = (h ^ h >> 16) * 0x85EBCA6B & WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def spark_bytes(data, seed):
    whole = len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        seed = spark_mix(seed, word)
    for byte in data[whole:]:
        seed = spark_mix(seed, (byte - 256 if byte >= 128 else byte) & WORD)
    return spark_finish(seed, len(data))


def spark_hash(type_, value, seed=42):
    t = pa.types
    if value is None:
        return seed
    if t.is_struct(type_):
        for field, part in zip(type_, value, strict=True):
            seed = spark_hash(field.type, part, seed)
        return seed
    if t.is_floating(type_):
        value = 0.0 if value == 0 else value if value == value else np.nan
        return spark_bytes(struct.pack("<d" if type_ == pa.float64() else "<f", value), seed)
    if t.is_decimal(type_) and type_.precision > 18:
        size = (value if value >= 0 else ~value).bit_length() // 8 + 1
        return spark_bytes(value.to_bytes(size, "big", signed=True), seed)
    if t.is_timestamp(type_):
        return spark_bytes(struct.pack("<q", value * 10**6 // UNITS[type_.unit]), seed)
    if type_ == pa.int64() or t.is_decimal(type_):
        return spark_bytes(struct.pack("<q", value), seed)
    if t.is_integer(type_) or t.is_boolean(type_) or t.is_date32(type_):
        return spark_bytes(struct.pack("<i", value), seed)
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return spark_bytes(data, seed)


def key_bytes_hash(type_, value):
    return mmh3.hash(encode_keys([column(type_, [value])])[0].as_py(), 0, signed=True)


REFERENCE = {
    "flink": java_hash,
    "murmur3": key_bytes_hash,
    "spark": lambda type_, value: signed(spark_hash(type_, value)),
}


def reference_group(code, m, scheme):
    if scheme == "spark":
        return code % m
    if scheme == "flink":
        code = mmh3.hash(struct.pack("<i", code), 0, signed=True)
    return (0 if code == -(2**31) else abs(code)) % m


# --- Golden: Flink's own classes --------------------------------------------------------------

STRUCTS = {
    "Tuple2<String,Long>": pa.struct([("f0", pa.string()), ("f1", pa.int64())]),
    "Tuple2<Integer,Integer>": pa.struct([("f0", pa.int32()), ("f1", pa.int32())]),
    "Tuple3<String,Integer,Boolean>": pa.struct(
        [("f0", pa.string()), ("f1", pa.int32()), ("f2", pa.bool_())]
    ),
}
TYPES = STRUCTS | {
    "Integer": pa.int32(),
    "Long": pa.int64(),
    "Byte": pa.int8(),
    "Short": pa.int16(),
    "Character": pa.int32(),  # a char hashes as its code
    "Boolean": pa.bool_(),
    "Double": pa.float64(),
    "Float": pa.float32(),
    "String": pa.string(),
}
# Flink's Row and BinaryRowData hash by rules of their own, and a list is no key here.
OUT_OF_SCOPE = {
    "Row<String,Long,Integer>",
    "Row<String,Long>",
    "Row<byte[],Long>",
    "Row{name,id}",
    "List",
    "BinaryRowData(BIGINT)",
    "BinaryRowData(STRING)",
}
BIG = {"BigDecimal", "BigInteger"}


@pytest.fixture(scope="module")
def golden_keys():
    rows = defaultdict(list)
    for path in sorted((GOLDEN / "flink").glob("keys_*.csv.gz")):
        for row in rows_of(path):
            rows[row["type"]].append(row)
    return rows


def golden_value(row):
    value = json.loads(row["key_json"])
    match row["type"]:
        case "Character":
            return ord(value)
        case "Double":
            return struct.unpack(">d", bytes.fromhex(row["key_bits"]))[0]
        case "Float":
            return struct.unpack(">f", bytes.fromhex(row["key_bits"]))[0]
    return tuple(value) if isinstance(value, list) else value


def golden_column(java_type, rows):
    if java_type in ("Double", "Float"):  # the exact bits, which a Python float may not keep
        bits = [int(row["key_bits"], 16) for row in rows]
        unsigned = np.uint64 if java_type == "Double" else np.uint32
        return pa.array(np.array(bits, unsigned)).view(TYPES[java_type])
    return column(TYPES[java_type], [golden_value(row) for row in rows])


def check_golden(array, rows):
    codes = hash_keys(array).to_pylist()
    assert codes == [int(row["hash_code"]) for row in rows]
    check_golden_groups(lambda m: assign_key_groups(array, m).to_pylist(), rows)
    check_golden_groups(lambda m: key_groups_of_hashes(hash_keys(array), m).tolist(), rows)


def check_golden_groups(groups_of, rows):
    for name in (name for name in rows[0] if name.startswith("kg_")):
        assert groups_of(int(name[3:])) == [int(row[name]) for row in rows], name


def test_the_vectors_hold_exactly_these_types(golden_keys):
    assert set(golden_keys) == set(TYPES) | BIG | OUT_OF_SCOPE


@pytest.mark.parametrize("java_type", TYPES)
def test_a_column_hashes_as_in_flink(golden_keys, java_type):
    rows = golden_keys[java_type]
    array = golden_column(java_type, rows)
    check_golden(array, rows)
    check_golden(array.dictionary_encode() if java_type not in STRUCTS else array, rows)
    check_golden(pa.chunked_array([array[:7], array[7:7], array[7:]]), rows)


@pytest.mark.parametrize("java_type", TYPES)
def test_a_single_key_hashes_as_in_flink(golden_keys, java_type):
    rows = golden_keys[java_type]
    values = [golden_value(row) for row in rows]
    typed = TYPES[java_type]
    check_golden_groups(lambda m: [assign_to_key_group(v, m, type=typed) for v in values], rows)
    if java_type in ("Long", "Double", "String", "Boolean", "Tuple2<String,Long>"):
        check_golden_groups(lambda m: [assign_to_key_group(v, m) for v in values], rows)


@pytest.mark.parametrize("java_type", sorted(TYPES))
def test_subtasks_are_those_of_flink(golden_keys, java_type):
    rows = golden_keys[java_type]
    for name in (name for name in rows[0] if name.startswith("op_")):
        m, p = map(int, name[3:].split("_"))
        groups = assign_key_groups(golden_column(java_type, rows), m).to_pylist()
        subtasks = [subtask_for_key_group(m, p, group) for group in groups]
        assert subtasks == [int(row[name]) for row in rows], name


def test_big_decimals_hash_as_in_flink(golden_keys):
    checked = 0
    for row in golden_keys["BigDecimal"]:
        value, scale = decimal.Decimal(json.loads(row["key_json"])), int(row["key_bits"][6:])
        sign, digits, exponent = value.as_tuple()
        assert exponent == -scale
        unscaled = int("".join(map(str, digits))) * (-1 if sign else 1)
        if len(digits) > 38:
            with pytest.raises(InvalidArgument, match="38"):
                assign_to_key_group(value, 128)
            continue
        check_golden(column(pa.decimal128(len(digits), scale), [unscaled]), [row])
        check_golden_groups(lambda m, v=value: [assign_to_key_group(v, m)], [row])
        checked += 1
    assert checked >= 10


def test_big_integers_hash_as_in_flink_where_arrow_has_them(golden_keys):
    # There is no Arrow type for BigInteger. Small ones hash as int32; those of 128 bits are the
    # unscaled value of a decimal, which adds one step of 31.
    checked = 0
    for row in golden_keys["BigInteger"]:
        value, code = int(json.loads(row["key_json"])), int(row["hash_code"])
        if -(2**31) <= value < 2**31:
            check_golden(column(pa.int32(), [value]), [row])
        if abs(value) < 10**38:
            decimals = column(pa.decimal128(38, 0), [value])
            assert hash_keys(decimals).to_pylist() == [signed(31 * code)]
            checked += 1
    assert checked >= 10


def test_the_one_hash_whose_murmur_has_no_absolute_value(golden_keys):
    assert key_groups_of_hashes(np.array([-2089875627], np.int32), 7).tolist() == [0]
    assert assign_to_key_group(-2089875627, 32768, type=pa.int32()) == 0
    assert assign_to_key_group(2205091669, 32768) == 0
    assert key_groups_of_hashes(np.array([-(2**31)], np.int32), 7, "murmur3").tolist() == [0]
    assert key_groups_of_hashes(np.array([-(2**31)], np.int32), 8, "murmur3").tolist() == [0]


def test_what_flink_refuses_is_refused():
    edges = {row["call"]: row["result"] for row in rows_of(GOLDEN / "flink/edge_calls.csv.gz")}
    assert "NullPointerException" in edges["assignToKeyGroup(null, 128)"]
    assert "InvalidProgramException" in edges["keyBy(byte[])"]
    assert "InvalidProgramException" in edges["keyBy(Tuple2<byte[],Long>)"]
    for call in (
        lambda: assign_to_key_group(None, 128),
        lambda: assign_to_key_group(b"key", 128),
        lambda: assign_to_key_group((b"key", 1), 128),
        lambda: assign_to_key_group(42, 0),  # divides by zero in Flink
        lambda: assign_to_key_group(42, -1),  # key group 0 in Flink
        lambda: assign_to_key_group(42, 32769),  # key group 26326 in Flink
    ):
        with pytest.raises(InvalidArgument):
            call()


# --- Golden: the JDK --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jdk():
    rows = defaultdict(list)
    for row in rows_of(GOLDEN / "jdk/jdk_hashes.csv.gz"):
        rows[row["type"]].append((row["value"], int(row["hash_code"])))
    return rows


def check_jdk(type_, pairs):
    assert len(pairs) > 3
    assert hash_keys(column(type_, [v for v, _ in pairs])).to_pylist() == [h for _, h in pairs]


def test_dates_hash_as_in_the_jdk(jdk):
    in_range = [(int(v), h) for v, h in jdk["LocalDate"] if -(2**31) <= int(v) < 2**31]
    check_jdk(pa.date32(), in_range)


@pytest.mark.parametrize("unit", UNITS)
def test_times_hash_as_in_the_jdk(jdk, unit):
    step = 10**9 // UNITS[unit]
    whole = [(int(v) // step, h) for v, h in jdk["LocalTime"] if int(v) % step == 0]
    check_jdk(pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit), whole)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("java_type", ["Instant", "LocalDateTime"])
def test_timestamps_hash_as_in_the_jdk(jdk, java_type, unit):
    pairs = []
    for text, code in jdk[java_type]:
        second, nano = map(int, text.split(":"))
        ticks, rest = divmod(second * 10**9 + nano, 10**9 // UNITS[unit])
        if rest == 0 and -(2**63) <= ticks < 2**63:
            pairs.append((ticks, code))
    check_jdk(pa.timestamp(unit, "Europe/Paris" if java_type == "Instant" else None), pairs)


def test_uuids_hash_as_in_the_jdk(jdk):
    check_jdk(pa.uuid(), [(uuid.UUID(v).bytes, h) for v, h in jdk["UUID"]])


def test_decimals_hash_as_in_the_jdk(jdk):
    by_scale = defaultdict(list)
    for text, code in jdk["BigDecimal"]:
        unscaled, scale = map(int, text.split(":"))
        by_scale[scale].append((unscaled, code))
    assert set(by_scale) == {0, 1, 2, 18, 38, -1, -3}
    for scale, pairs in by_scale.items():
        check_jdk(pa.decimal128(38, scale), pairs)
    check_jdk(pa.decimal128(38, 0), [(int(v), signed(31 * h)) for v, h in jdk["BigInteger"]])
    assert [big_integer(int(v)) for v, _ in jdk["BigInteger"]] == [h for _, h in jdk["BigInteger"]]


# --- Any column of any type against plain Python ----------------------------------------------

TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates included
ASCII = st.text(st.characters(max_codepoint=127), max_size=20)
YEARS_1_TO_9999 = (-719_162, 2_932_896)


def integers(bits):
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def ticks(unit):
    first, last = (day * 86_400 * UNITS[unit] for day in YEARS_1_TO_9999)
    return st.integers(max(first, -(2**63)), min(last, 2**63 - 1))


LEAVES = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), integers(8)),
    (pa.int16(), integers(16)),
    (pa.int32(), integers(32)),
    (pa.int64(), integers(64)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), TEXT | ASCII),
    (pa.large_string(), ASCII),
    (pa.string_view(), TEXT),
    (pa.date32(), st.integers(*YEARS_1_TO_9999)),
    *((pa.timestamp(unit), ticks(unit)) for unit in UNITS),
    (pa.timestamp("us", "UTC"), ticks("us")),
    (pa.timestamp("ns", "Asia/Tokyo"), ticks("ns")),
    (pa.time32("s"), st.integers(0, 86_399)),
    (pa.time32("ms"), st.integers(0, 86_399_999)),
    (pa.time64("us"), st.integers(0, 86_400 * 10**6 - 1)),
    (pa.time64("ns"), st.integers(0, 86_400 * 10**9 - 1)),
    (pa.decimal128(5, 2), st.integers(-99_999, 99_999)),
    (pa.decimal128(18, 0), st.integers(1 - 10**18, 10**18 - 1)),
    (pa.decimal128(19, 4), st.integers(1 - 10**19, 10**19 - 1)),
    (pa.decimal128(38, 10), st.integers(1 - 10**38, 10**38 - 1)),
    (pa.uuid(), st.binary(min_size=16, max_size=16)),
    (pa.binary(), st.binary(max_size=20)),
    (pa.large_binary(), st.binary(max_size=20)),
    (pa.binary_view(), st.binary(max_size=20)),
    (pa.binary(5), st.binary(min_size=5, max_size=5)),
]

NANOSECONDS = {type_ for type_, _ in LEAVES if getattr(type_, "unit", "") == "ns"}


def structs(children):
    def assemble(fields):
        type_ = pa.struct([(f"f{i}", child) for i, (child, _) in enumerate(fields)])
        return type_, st.tuples(*(st.none() | values for _, values in fields))

    with_null = children | st.just((pa.null(), st.none()))
    return st.lists(with_null, min_size=1, max_size=3).map(assemble)


def takes(scheme, type_):
    try:
        check_key_type(type_, scheme)
    except InvalidArgument:
        return False
    return True


def key_types(scheme):
    leaves = [leaf for leaf in LEAVES if takes(scheme, leaf[0])]
    if scheme == "spark":  # it has no nanoseconds; the values here may have
        leaves = [leaf for leaf in leaves if leaf[0] not in NANOSECONDS]
    return st.recursive(st.sampled_from(leaves), structs, max_leaves=5)


@st.composite
def keys_of_a_type(draw, scheme):
    type_, values = draw(key_types(scheme))
    return type_, draw(st.lists(values, max_size=8))


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: str(leaf[0]))
@given(data=st.data())
def test_a_column_of_each_simple_type_hashes_as_its_values(leaf, data):
    type_, values = leaf
    rows = data.draw(st.lists(values, max_size=12))
    array = column(type_, rows)
    for scheme in SCHEMES:
        if takes(scheme, type_) and not (scheme == "spark" and type_ in NANOSECONDS):
            expected = [REFERENCE[scheme](type_, row) for row in rows]
            assert hash_keys(array, scheme).to_pylist() == expected


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
def test_a_column_hashes_as_its_values_one_by_one(scheme, data):
    type_, values = data.draw(keys_of_a_type(scheme))
    m = data.draw(st.integers(1, 32768) | st.sampled_from([1, 128, 32768]))
    array = column(type_, values)
    codes = [REFERENCE[scheme](type_, value) for value in values]
    groups = [reference_group(code, m, scheme) for code in codes]
    assert hash_keys(array, scheme).to_pylist() == codes
    assert assign_key_groups(array, m, scheme).to_pylist() == groups
    assert key_groups_of_hashes(hash_keys(array, scheme), m, scheme).tolist() == groups
    at = data.draw(st.integers(0, len(values)))
    assert hash_keys(array[at:], scheme).to_pylist() == codes[at:]
    assert hash_keys(array[:at], scheme).to_pylist() == codes[:at]
    parts = pa.chunked_array([array[:at], array[at:]], type_)
    assert assign_key_groups(parts, m, scheme).to_pylist() == groups


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
def test_a_single_key_has_the_group_of_a_column(scheme, data):
    type_, values = data.draw(keys_of_a_type(scheme))
    for value in values:
        array = column(type_, [value])
        if contains_raw_integers(type_):
            continue
        group = assign_key_groups(array, 4096, scheme)[0].as_py()
        assert assign_to_key_group(value, 4096, scheme, type_) == group


def contains_raw_integers(type_):
    """Whether ``column`` takes an integer where a user would pass a date, time or decimal."""
    if pa.types.is_struct(type_):
        return any(contains_raw_integers(field.type) for field in type_)
    return pa.types.is_temporal(type_) or pa.types.is_decimal(type_)


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.string_view(), pa.int32(), pa.uuid()]
)
@given(data=st.data())
def test_a_dictionary_hashes_as_its_values(type_, data):
    values = data.draw(st.lists(dict(LEAVES)[type_], min_size=1, max_size=5))
    indices = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=12))
    array = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), column(type_, values))
    codes = [java_hash(type_, values[i]) for i in indices]
    assert hash_keys(array).to_pylist() == codes
    assert hash_keys(array[2:]).to_pylist() == codes[2:]
    struct_type = pa.struct([("d", array.type)])
    nested = pa.StructArray.from_arrays([array], fields=list(struct_type))
    assert hash_keys(nested).to_pylist() == codes


@given(
    st.lists(TEXT | ASCII, min_size=1, max_size=5),
    st.integers(0, 5),
    st.sampled_from([0, 1, 37]),
)
def test_many_rows_of_text_hash_as_their_values(texts, at, extra):
    # More rows than a slice and than a block, so that every boundary is crossed.
    values = (texts * (70_000 // len(texts) + 1))[: 65_536 + extra]
    values[-1] = texts[0]
    expected = {text: java_hash(pa.string(), text) for text in texts}
    hashes = hash_keys(column(pa.string(), values)[at:]).to_pylist()
    assert hashes == [expected[text] for text in values[at:]]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 63, 64, 1000])
def test_ascii_texts_of_one_length_hash_as_their_values(length):
    generator = np.random.default_rng(length)
    rows = generator.integers(0, 128, (40_000 if length < 100 else 300, max(length, 1)), np.uint8)
    texts = [row[:length].tobytes().decode() for row in rows]
    sample = range(0, len(texts), 97)
    hashes = hash_keys(pa.array(texts)).to_pylist()
    assert [hashes[i] for i in sample] == [java_hash(pa.string(), texts[i]) for i in sample]


@pytest.mark.parametrize("around", [2**18 - 1, 2**18, 2**18 + 1, 2**19 + 5])
@pytest.mark.parametrize("end", ["", "é", "🙂"])
def test_a_text_longer_than_a_block_hashes_as_its_units(around, end):
    texts = ["", "x" * around + end, "short", "y" * 10 + end]
    for scheme in SCHEMES:
        hashes = hash_keys(pa.array(texts), scheme).to_pylist()
        assert hashes == [REFERENCE[scheme](pa.string(), text) for text in texts]
    assert hash_keys(pa.array(texts[1:2])).to_pylist() == [java_hash(pa.string(), texts[1])]


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 2**32 - 1))
@example([b"", b"a", b"ab", b"abc", b"abcd"], 0)
@example([b"\xff" * 3] * 5, 42)
def test_the_murmur3_kernel_is_mmh3(values, seed):
    lengths = np.array([len(value) for value in values], np.int64)
    starts = np.cumsum(lengths) - lengths
    h = np.full(len(values), seed, np.uint32)
    data = np.frombuffer(b"".join(values), np.uint8)
    murmur3.hash_spans(h, data, starts, lengths, murmur3.standard_tail)
    assert h.tolist() == [mmh3.hash(value, seed, signed=False) for value in values]


def test_the_murmur3_kernel_over_many_rows_is_mmh3():
    generator = np.random.default_rng(5)
    lengths = generator.integers(0, 90, 80_000)
    lengths[[3, 40_000, 79_999]] = 1023, 1029, 70_001  # around where mmh3 itself takes over
    values = [generator.bytes(n) for n in lengths.tolist()]
    for few in (values, values[:9], [value[:9].ljust(9) for value in values]):
        hashes = hash_keys(pa.array(few, pa.binary()), "murmur3").to_pylist()
        assert hashes == [mmh3.hash(value, 0, signed=True) for value in few]


def test_the_spark_tail_over_many_rows():
    generator = np.random.default_rng(6)
    lengths = generator.integers(0, 30, 40_000)
    lengths[[3, 39_999]] = 1027, 5003
    values = [generator.bytes(n) for n in lengths.tolist()]
    hashes = hash_keys(pa.array(values, pa.binary()), "spark").to_pylist()
    assert hashes == [signed(spark_bytes(value, 42)) for value in values]


# --- Edges ------------------------------------------------------------------------------------

FALSY = [0, "", False, -0.0, 0.0, float("nan"), (0,), (None,), ("", None), decimal.Decimal(0)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("key", FALSY, ids=repr)
def test_falsy_keys_are_keys(key, scheme):
    assert 0 <= assign_to_key_group(key, 128, scheme) < 128


def test_falsy_keys_hash_as_in_java():
    def code(key, type_):
        return hash_keys(pa.array([key], type_))[0].as_py()

    assert code(0, pa.int64()) == 0
    assert code("", pa.string()) == 0
    assert code(False, pa.bool_()) == 1237
    assert code(0.0, pa.float64()) == 0
    assert code(-0.0, pa.float64()) == -(2**31)
    assert code(float("nan"), pa.float64()) == 2146959360
    assert hash_keys(pa.array([b"", b"\0"], pa.binary()), "spark")[0].as_py() == 142593372


def test_the_two_zeros_are_one_key_for_spark():
    for type_ in (pa.float32(), pa.float64()):
        hashes = hash_keys(pa.array([0.0, -0.0], type_), "spark").to_pylist()
        assert hashes == [signed(spark_hash(type_, 0.0))] * 2
        assert hash_keys(pa.array([0.0], type_)) != hash_keys(pa.array([-0.0], type_))


def test_complements_and_extremes_of_long():
    keys = [0, 1, 5, 2**31, 2**40 + 3, 2**63 - 1]
    array, complement = pa.array(keys), pa.array([~key for key in keys])
    assert hash_keys(array) == hash_keys(complement)
    assert hash_keys(pa.array([-(2**63), 2**63 - 1])).to_pylist() == [-(2**31)] * 2
    assert assign_to_key_group(-1, 128) == assign_to_key_group(0, 128) == 94


def test_surrogates_as_java_holds_them():
    pair, halves = "🙂", "\ud83d\ude42"
    for text in ("\ud800", "a\udc00b", "\ude00\ud83d", pair, halves):
        expected = java_hash(pa.string(), text)
        for type_ in (pa.string(), pa.large_string(), pa.string_view()):
            assert hash_keys(column(type_, [text, "x"])).to_pylist() == [expected, 120]
            assert assign_to_key_group(text, 4096, type=type_) == reference_group(
                expected, 4096, "flink"
            )
        assert assign_to_key_group(text, 4096) == assign_to_key_group((text,), 4096)
    assert java_hash(pa.string(), pair) == java_hash(pa.string(), halves)


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xa9", b"\xc0\x80", b"\xf5\x80\x80\x80"])
@pytest.mark.parametrize("row", [0, 3, 70_000])
def test_what_is_not_utf8_is_refused_and_named(bad, row):
    rows = [b"a", "é".encode(), b""] * 30_000
    rows[row] = bad
    array = pa.array(rows, pa.binary()).view(pa.string())
    with pytest.raises(InvalidArgument, match=rf"row {row}\b.*UTF-8"):
        hash_keys(array)
    with pytest.raises(InvalidArgument, match=rf"row {row + 2}\b.*UTF-8"):
        hash_keys(pa.chunked_array([["x", "y"], array]))
    whole = array.dictionary_encode()
    with pytest.raises(InvalidArgument, match=rf"row {row}\b.*UTF-8"):
        hash_keys(whole)


def test_characters_split_between_rows_are_refused():
    array = pa.array([b"ok", b"\xc3", b"\xa9"], pa.binary()).view(pa.string())
    with pytest.raises(InvalidArgument, match=r"row 1 .*UTF-8"):
        hash_keys(array)
    nested = pa.StructArray.from_arrays(
        [pa.array([None, None, b"\xc3", b"\xa9"], pa.binary()).view(pa.string())], ["s"]
    )
    with pytest.raises(InvalidArgument, match=r"row 2 .*UTF-8"):
        hash_keys(nested)


def test_bytes_outside_a_slice_are_not_read():
    array = pa.array([b"\xff\xfe", b"abc", b"d", b"\xff"], pa.binary()).view(pa.string())
    assert hash_keys(array[1:3]).to_pylist() == [96354, 100]


def test_bytes_below_a_null_field_are_not_read():
    text = pa.array([b"\xff", b"a"], pa.binary())
    valid = pa.array([False, True]).buffers()[1]
    hidden = pa.Array.from_buffers(pa.string(), 2, [valid, *text.buffers()[1:]])
    nested = pa.StructArray.from_arrays([hidden, pa.array([1, 2])], ["a", "b"])
    assert hash_keys(nested).to_pylist() == [1, 31 * 97 + 2]


def test_a_null_key_is_refused_and_its_row_named():
    for scheme in SCHEMES:
        keys = pa.chunked_array([[1, 2], [3, None, None]])
        with pytest.raises(InvalidArgument, match="null in row 3"):
            hash_keys(keys, scheme)
        with pytest.raises(InvalidArgument, match="null in row 1"):
            assign_key_groups(pa.array(["a", None]), 128, scheme)
        with pytest.raises(InvalidArgument, match="null in row 2"):
            hash_keys(pa.array(["a", "b", None]).dictionary_encode(), scheme)
        hidden = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1]), pa.array(["a", None]))
        with pytest.raises(InvalidArgument, match="null in row 2"):
            hash_keys(hidden, scheme)
        assert len(hash_keys(hidden[:2], scheme)) == 2
    with pytest.raises(InvalidArgument, match="null in row 0"):
        hash_keys(pa.array([None, {"a": 1}]))
    with pytest.raises(InvalidArgument, match="null in row 1"):
        key_groups_of_hashes(pa.array([1, None], pa.int32()), 128)
    for key, type_ in ((None, None), (None, pa.int64()), (np.datetime64("NaT", "us"), None)):
        with pytest.raises(InvalidArgument, match="null"):
            assign_to_key_group(key, 128, type=type_)


def test_an_empty_column_has_no_key_groups():
    for scheme in SCHEMES:
        for type_ in (pa.int64(), pa.string(), pa.bool_(), pa.struct([("a", pa.string())])):
            for empty in (pa.array([], type_), pa.chunked_array([], type_)):
                assert assign_key_groups(empty, 128, scheme) == pa.array([], pa.uint16())
                assert hash_keys(empty, scheme) == pa.array([], pa.int32())
        with pytest.raises(InvalidArgument):
            assign_key_groups(pa.array([], pa.int64()), 0, scheme)


NEVER_KEYS = [
    (pa.list_(pa.int64()), "struct"),
    (pa.map_(pa.string(), pa.int64()), "struct"),
    (pa.struct([]), "at least one field"),
    (pa.uint8(), "signed"),
    (pa.uint64(), "signed"),
    (pa.float16(), "float32"),
    (pa.duration("us"), "int64"),
    (pa.date64(), "date32"),
    (pa.decimal256(40, 2), "decimal128"),
    (pa.null(), "null"),
    (pa.month_day_nano_interval(), "cast"),
    (pa.run_end_encoded(pa.int32(), pa.int64()), "cast"),
    (pa.dictionary(pa.int8(), pa.uint8()), "signed"),
    (pa.struct([("a", pa.struct([("b", pa.uint8())]))]), "'a.b'.*signed"),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("type_", "cure"), NEVER_KEYS, ids=lambda part: str(part)[:30])
def test_an_unsupported_type_is_refused_with_a_cure(type_, cure, scheme):
    with pytest.raises(InvalidArgument, match=f"{scheme}.*{cure}"):
        check_key_type(type_, scheme)
    with pytest.raises(InvalidArgument, match=cure):
        assign_to_key_group(1, 128, scheme, type_)
    if not pa.types.is_run_end_encoded(type_):
        with pytest.raises(InvalidArgument, match=cure):
            hash_keys(pa.array([], type_), scheme)


@pytest.mark.parametrize(
    ("type_", "scheme", "cure"),
    [
        (pa.binary(), "flink", "identity.*string"),
        (pa.binary_view(), "flink", "identity.*string"),
        (pa.binary(4), "flink", "identity.*string"),
        (pa.struct([("a", pa.large_binary())]), "flink", "'a'.*identity"),
        (pa.time64("us"), "spark", "int64"),
        (pa.uuid(), "spark", "string"),
    ],
)
def test_a_type_of_another_scheme_is_refused_with_a_cure(type_, scheme, cure):
    with pytest.raises(InvalidArgument, match=cure):
        check_key_type(type_, scheme)
    check_key_type(type_, "murmur3")


@pytest.mark.parametrize("call", [check_scheme, lambda s: hash_keys(pa.array([1]), s)])
@pytest.mark.parametrize("scheme", ["", "Flink", "md5", None])
def test_an_unknown_scheme_is_refused(call, scheme):
    with pytest.raises(InvalidArgument, match="flink, murmur3, spark"):
        call(scheme)


@pytest.mark.parametrize("m", [0, -1, 32769, 1.0, "128", True, None])
def test_a_max_parallelism_out_of_bounds_is_refused(m):
    for call in (
        lambda: assign_key_groups(pa.array([1]), m),
        lambda: assign_to_key_group(1, m),
        lambda: assign_to_key_group(1.5, m),
        lambda: key_groups_of_hashes(np.array([1], np.int32), m),
    ):
        with pytest.raises(InvalidArgument, match="max parallelism"):
            call()


@pytest.mark.parametrize("hashes", [np.array([1]), np.array([[1]], np.int32), [1], pa.array([1])])
def test_hashes_that_are_no_int32_are_refused(hashes):
    with pytest.raises(InvalidArgument, match="int32"):
        key_groups_of_hashes(hashes, 128)


@pytest.mark.parametrize("keys", [[1], np.array([1]), None, "key"])
def test_keys_that_are_no_arrow_array_are_refused(keys):
    with pytest.raises(InvalidArgument, match="pyarrow"):
        hash_keys(keys)


def test_the_arguments_stay_as_they_were():
    hashes = np.arange(-5, 5, dtype=np.int32)
    key_groups_of_hashes(hashes, 128)
    key_groups_of_hashes(hashes, 100, "spark")
    assert hashes.tolist() == list(range(-5, 5))
    floats = pa.array([0.0, -0.0, float("nan")])
    before = floats.buffers()[1].to_pybytes()
    for scheme in SCHEMES:
        assign_key_groups(floats, 7, scheme)
    assert floats.buffers()[1].to_pybytes() == before


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([0, -1], pa.time64("us")),
        ([0, 86_400_000], pa.time32("ms")),
        ([0, 2**62], pa.timestamp("s")),
        ([0, -(2**62)], pa.timestamp("s", "UTC")),
    ],
)
def test_a_time_beyond_java_is_refused_and_its_row_named(values, type_):
    with pytest.raises(InvalidArgument, match="row 1 "):
        hash_keys(column(type_, values))
    nested = pa.struct([("t", type_)])
    with pytest.raises(InvalidArgument, match="row 2 "):
        hash_keys(column(nested, [(None,), *((v,) for v in values)]))


@pytest.mark.parametrize(
    ("values", "type_"), [([0, 1], pa.timestamp("ns")), ([0, 2**62], pa.timestamp("s"))]
)
def test_a_timestamp_that_spark_has_not_is_refused(values, type_):
    with pytest.raises(InvalidArgument, match=r"row 1 .*Spark"):
        hash_keys(column(type_, values), "spark")


# --- Single keys: which type a Python value has -----------------------------------------------

NOON = dt.datetime.fromisoformat("1969-07-20T12:17:40.123456")
PARIS = dt.timezone(dt.timedelta(hours=2))


@pytest.mark.parametrize(
    ("key", "type_", "stored"),
    [
        (True, pa.bool_(), True),
        (7, pa.int64(), 7),
        (1.5, pa.float64(), 1.5),
        ("é", pa.string(), "é"),
        (decimal.Decimal("-1.50"), pa.decimal128(3, 2), -150),
        (decimal.Decimal("1E+3"), pa.decimal128(1, -3), 1),
        (decimal.Decimal("0.007"), pa.decimal128(1, 3), 7),
        (dt.date(1969, 7, 20), pa.date32(), -165),
        (NOON, pa.timestamp("us"), -14211739876544),
        (NOON.replace(tzinfo=PARIS), pa.timestamp("us", "UTC"), -14218939876544),
        (dt.time(0, 0, 1), pa.time64("us"), 10**6),
        (uuid.UUID(int=5), pa.uuid(), uuid.UUID(int=5).bytes),
        (np.int8(-3), pa.int8(), -3),
        (np.int32(7), pa.int32(), 7),
        (np.int64(-(2**40)), pa.int64(), -(2**40)),
        (np.float32(1.1), pa.float32(), np.float32(1.1).item()),
        (np.float64(1.1), pa.float64(), 1.1),
        (np.bool_(True), pa.bool_(), True),
        (np.str_("s"), pa.string(), "s"),
        (np.datetime64("1969-07-20"), pa.date32(), -165),
        (np.datetime64(-7, "ns"), pa.timestamp("ns"), -7),
        ((1, "a"), pa.struct([("a", pa.int64()), ("b", pa.string())]), (1, "a")),
        ((1, None), pa.struct([("a", pa.int64()), ("b", pa.null())]), (1, None)),
        (
            (1, (None, True)),
            pa.struct([("a", pa.int64()), ("b", STRUCTS["Tuple2<String,Long>"])]),
            None,
        ),
    ],
    ids=repr,
)
def test_the_inferred_type(key, type_, stored):
    if stored is None:  # the null's type does not matter to a Java hash
        inner = pa.struct([("f0", pa.null()), ("f1", pa.bool_())])
        type_, stored = pa.struct([("a", pa.int64()), ("b", inner)]), (1, (None, True))
    expected = reference_group(java_hash(type_, stored), 4096, "flink")
    assert assign_to_key_group(key, 4096) == expected
    assert assign_to_key_group(key, 4096, type=type_) == expected


def test_bytes_are_binary_where_the_scheme_takes_them():
    for key in (b"", b"\0", b"abc"):
        group = assign_key_groups(pa.array([key], pa.binary()), 4096, "murmur3")[0].as_py()
        assert assign_to_key_group(key, 4096, "murmur3") == group
        assert assign_to_key_group(key, 4096, "spark") == spark_bytes(key, 42) % 4096


def test_the_given_type_wins():
    assert assign_to_key_group(-1, 128, type=pa.int32()) == 80
    assert assign_to_key_group(-1, 128) == 94
    struct_type = pa.struct([("a", pa.string()), ("b", pa.int64())])
    key = {"a": "a", "b": 1}
    assert assign_to_key_group(key, 128, type=struct_type) == assign_to_key_group(("a", 1), 128)
    assert assign_to_key_group({"a": "a"}, 128, type=struct_type) == assign_to_key_group(
        ("a", None), 128
    )
    dictionary = pa.dictionary(pa.int8(), pa.string())
    assert assign_to_key_group("a", 128, type=dictionary) == 81


@pytest.mark.parametrize(
    ("key", "type_"),
    [
        (2**63, None),
        (-(2**63) - 1, None),
        (2**31, pa.int32()),
        (np.uint8(1), None),
        (np.float16(1), None),
        (np.timedelta64(1, "s"), None),
        (np.complex128(1), None),
        ([1], None),
        ({"a": 1}, None),
        (object(), None),
        ((), None),
        (dt.timedelta(1), None),
        (decimal.Decimal("NaN"), None),
        (decimal.Decimal("Infinity"), pa.decimal128(5, 2)),
        (decimal.Decimal(10**38), None),
        (decimal.Decimal("0.001"), pa.decimal128(5, 2)),
        (decimal.Decimal(1000), pa.decimal128(5, 2)),
        ("1", pa.int64()),
        (1.5, pa.int64()),
        (float("inf"), pa.int64()),
        (NOON, pa.date32()),
        (NOON, pa.timestamp("ms")),
        (NOON.time(), pa.time32("s")),
        (1, pa.string()),
        (True, pa.int64()),
        ((1,), pa.struct([("a", pa.int64()), ("b", pa.int64())])),
        ("ab", pa.struct([("a", pa.string()), ("b", pa.string())])),
        ({"c": 1}, pa.struct([("a", pa.int64())])),
        (1, pa.struct([("a", pa.int64())])),
        (1, "int64"),
    ],
    ids=repr,
)
def test_a_value_that_is_no_key_of_the_type_is_refused(key, type_):
    with pytest.raises(InvalidArgument):
        assign_to_key_group(key, 128, type=type_)
