"""Canonical key bytes: exact inverse, order, and what is refused."""

import decimal
import functools
import math
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keygroups.errors import InvalidArgument, SnapshotCorrupted
from keygroups.keys import decode_keys, encode_keys

NAN = float("nan")


def column(type_, values):
    """An array of ``values``: strings may hold lone surrogates, times and decimals are integers."""
    t = pa.types
    if t.is_null(type_):
        return pa.nulls(len(values))
    if t.is_struct(type_):
        columns = [
            column(field.type, [None if v is None else v[i] for v in values])
            for i, field in enumerate(type_)
        ]
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(columns, fields=list(type_), mask=mask)
    if isinstance(type_, pa.DictionaryType):
        pool = list(dict.fromkeys(value for value in values if value is not None))
        indices = [None if value is None else pool.index(value) for value in values]
        return pa.DictionaryArray.from_arrays(
            pa.array(indices, type_.index_type), column(type_.value_type, pool)
        )
    if type_ in TEXTS:
        raw = [None if v is None else v.encode("utf-8", "surrogatepass") for v in values]
        return pa.array(raw, TEXTS[type_]).view(type_)
    if t.is_decimal(type_):
        data = b"".join((v or 0).to_bytes(16, "little", signed=True) for v in values)
        valid = pa.array([value is not None for value in values], pa.bool_()).buffers()[1]
        return pa.Array.from_buffers(type_, len(values), [valid, pa.py_buffer(data)])
    if t.is_temporal(type_):
        return pa.array(values, pa.int32() if type_.bit_width == 32 else pa.int64()).view(type_)
    if isinstance(type_, pa.UuidType):
        return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))
    return pa.array(values, type_)


TEXTS = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def integers(bits):
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def encoded_text(text):
    return text.encode("utf-8", "surrogatepass")


# Zeros are the bytes that are escaped, so they must be frequent.
BYTES = st.binary(max_size=6) | st.lists(st.sampled_from([b"\0", b"\xff", b"a"])).map(b"".join)
TEXT = st.text(max_size=6) | st.text("\0\x01aÿ\ud800\udc00🙂", max_size=5)
LEAVES = {
    pa.bool_(): st.booleans(),
    pa.int8(): integers(8),
    pa.int16(): integers(16),
    pa.int32(): integers(32),
    pa.int64(): integers(64),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.string_view(): TEXT,
    pa.binary(): BYTES,
    pa.large_binary(): BYTES,
    pa.binary_view(): BYTES,
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.binary(0): st.just(b""),
    pa.date32(): integers(32),
    pa.timestamp("s"): integers(64),
    pa.timestamp("ns", "UTC"): integers(64),
    pa.time32("ms"): integers(32),
    pa.time64("ns"): integers(64),
    pa.decimal128(7, 2): st.integers(1 - 10**7, 10**7 - 1),
    pa.decimal128(38, 4): st.integers(1 - 10**38, 10**38 - 1),
    pa.uuid(): st.binary(min_size=16, max_size=16),
    pa.dictionary(pa.int8(), pa.string()): TEXT,
    pa.dictionary(pa.uint16(), pa.int64()): integers(64),
    pa.dictionary(pa.int32(), pa.uuid()): st.binary(min_size=16, max_size=16),
}


def structs(children):
    def assemble(fields):
        type_ = pa.struct([(f"f{i}", child) for i, (child, _) in enumerate(fields)])
        return type_, st.tuples(*(st.none() | values for _, values in fields))

    with_null = children | st.just((pa.null(), st.none()))
    return st.lists(with_null, min_size=1, max_size=3).map(assemble)


KEY_TYPES = st.recursive(st.sampled_from(list(LEAVES.items())), structs, max_leaves=5)


@st.composite
def composite_keys(draw):
    """The types of one to three components, and rows of their values."""
    components = draw(st.lists(KEY_TYPES, min_size=1, max_size=3))
    types = [type_ for type_, _ in components]
    rows = draw(st.lists(st.tuples(*(values for _, values in components)), max_size=8))
    return types, rows


def columns_of(types, rows):
    return [column(type_, [row[i] for row in rows]) for i, type_ in enumerate(types)]


def same(a, b):
    """Equality of arrays in which a NaN equals a NaN and -0.0 differs from 0.0."""
    return a.type == b.type and bits(a) == bits(b)


def bits(array):
    if isinstance(array.type, pa.DictionaryType):
        codes, values = array.indices.to_pylist(), bits(array.dictionary)
        return [None if code is None else values[code] for code in codes]
    if pa.types.is_struct(array.type):
        nulls = array.is_null().to_pylist()
        rows = zip(*(bits(field) for field in array.flatten()), strict=True)
        return [None if null else row for null, row in zip(nulls, rows, strict=True)]
    if array.type in TEXTS:
        return array.view(TEXTS[array.type]).to_pylist()
    if pa.types.is_floating(array.type):
        packed = "<d" if array.type == pa.float64() else "<f"
        return [
            None if v is None else struct.pack(packed, NAN if math.isnan(v) else v)
            for v in array.to_pylist()
        ]
    if pa.types.is_temporal(array.type):
        return array.view(pa.int32() if array.type.bit_width == 32 else pa.int64()).to_pylist()
    if isinstance(array.type, pa.UuidType):
        return array.storage.to_pylist()
    return array.to_pylist()


# --- The encoding, one value at a time, from its definition -----------------------------------


def encode_one(type_, value, last):
    t = pa.types
    if isinstance(type_, pa.DictionaryType):
        return encode_one(type_.value_type, value, last)
    if t.is_struct(type_):
        pieces = []
        for i, (field, part) in enumerate(zip(type_, value, strict=True)):
            is_last = last and i == len(type_) - 1
            pieces.append(b"\0" if part is None else b"\1" + encode_one(field.type, part, is_last))
        return b"".join(pieces)
    if t.is_boolean(type_):
        return bytes([value])
    if t.is_floating(type_):
        width, code = (8, ">d") if type_ == pa.float64() else (4, ">f")
        raw = struct.pack(code, NAN if math.isnan(value) else value)
        number, sign = int.from_bytes(raw, "big"), 1 << (8 * width - 1)
        number ^= sign if number < sign else 2 * sign - 1
        return number.to_bytes(width, "big")
    if t.is_decimal(type_):
        return (value + 2**127).to_bytes(16, "big")
    if t.is_integer(type_) or t.is_temporal(type_):
        return (value + (1 << (type_.bit_width - 1))).to_bytes(type_.bit_width // 8, "big")
    data = encoded_text(value) if isinstance(value, str) else value
    if last or t.is_fixed_size_binary(type_) or isinstance(type_, pa.UuidType):
        return data
    return data.replace(b"\0", b"\0\xff") + b"\0\0"


def order_key(type_, value):
    """Something that Python sorts in the order that the type's values are to have."""
    if isinstance(type_, pa.DictionaryType):
        return order_key(type_.value_type, value)
    if pa.types.is_struct(type_):
        return [
            (0,) if part is None else (1, order_key(field.type, part))
            for field, part in zip(type_, value, strict=True)
        ]
    if pa.types.is_floating(type_):
        return (1, 0.0, 0.0) if math.isnan(value) else (0, value, math.copysign(1, value))
    return encoded_text(value) if isinstance(value, str) else value


@given(composite_keys())
def test_the_bytes_are_those_of_the_definition(keys):
    types, rows = keys
    encoded = encode_keys(columns_of(types, rows))
    assert encoded.type == pa.large_binary()
    assert encoded.to_pylist() == [
        b"".join(
            encode_one(type_, part, last=i == len(types) - 1)
            for i, (type_, part) in enumerate(zip(types, row, strict=True))
        )
        for row in rows
    ]


@given(composite_keys(), st.integers(0, 8))
def test_decoding_is_the_inverse(keys, at):
    types, rows = keys
    columns = columns_of(types, rows)
    encoded = encode_keys(columns)
    for binary in (encoded, encoded.cast(pa.binary()), pa.chunked_array([encoded, encoded[:0]])):
        decoded = decode_keys(binary, types)
        for array, original in zip(decoded, columns, strict=True):
            assert same(array, original)
            array.validate()
            assert is_valid(array) >= is_valid(original)
    some = decode_keys(encoded[at:], types)
    assert encode_keys([array[at:] for array in columns]) == encoded[at:]
    assert all(same(a, b[at:]) for a, b in zip(some, columns, strict=True))


def is_valid(array):
    """Arrow's own opinion, which is against lone surrogates and times beyond a day."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


@given(composite_keys())
def test_the_order_of_the_bytes_is_that_of_the_values(keys):
    types, rows = keys
    encoded = encode_keys(columns_of(types, rows)).to_pylist()
    wanted = [
        [order_key(type_, part) for type_, part in zip(types, row, strict=True)] for row in rows
    ]
    for i, a in enumerate(rows):
        for j in range(i, len(rows)):
            assert (encoded[i] < encoded[j]) == (wanted[i] < wanted[j]), (a, rows[j])
            assert (encoded[i] == encoded[j]) == (wanted[i] == wanted[j]), (a, rows[j])


@given(composite_keys(), st.data())
def test_damaged_bytes_are_refused_or_mean_another_key(keys, data):
    types, rows = keys
    encoded = encode_keys(columns_of(types, rows)).to_pylist()
    if not encoded:
        return
    row = data.draw(st.integers(0, len(encoded) - 1))
    damaged = bytearray(encoded[row])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["cut", "insert", "set"])):
            case "cut":
                del damaged[at:]
            case "insert":
                damaged.insert(at, data.draw(st.sampled_from([0, 1, 2, 0x80, 0xFF])))
            case "set" if at < len(damaged):
                damaged[at] = data.draw(st.integers(0, 255))
    encoded[row] = bytes(damaged)
    array = pa.array(encoded, pa.large_binary())
    try:
        columns = decode_keys(array, types)
    except SnapshotCorrupted as error:
        assert f"row {row}, offset" in str(error)  # noqa: PT017 - both outcomes are good
    else:
        assert encode_keys(columns) == array


# --- By hand ----------------------------------------------------------------------------------


def one(value, type_, last=True):
    columns = [pa.array([value], type_)] + ([] if last else [pa.array([0], pa.int8())])
    raw = encode_keys(columns)[0].as_py()
    return (raw if last else raw[:-1]).hex()


@pytest.mark.parametrize(
    ("value", "type_", "expected"),
    [
        (0, pa.int8(), "80"),
        (-1, pa.int16(), "7fff"),
        (1, pa.int32(), "80000001"),
        (-(2**63), pa.int64(), "0000000000000000"),
        (2**63 - 1, pa.int64(), "ffffffffffffffff"),
        (False, pa.bool_(), "00"),
        (True, pa.bool_(), "01"),
        (0.0, pa.float64(), "8000000000000000"),
        (-0.0, pa.float64(), "7fffffffffffffff"),
        (-math.inf, pa.float64(), "000fffffffffffff"),
        (math.inf, pa.float32(), "ff800000"),
        (NAN, pa.float64(), "fff8000000000000"),
        (NAN, pa.float32(), "ffc00000"),
        ("", pa.string(), ""),
        ("a\0b", pa.string(), "610062"),
        (b"", pa.binary(), ""),
        (decimal.Decimal("-0.01"), pa.decimal128(3, 2), "7f" + "ff" * 15),
        ({"a": None, "b": "x"}, pa.struct([("a", pa.int8()), ("b", pa.string())]), "000178"),
        ({"a": 1, "b": None}, pa.struct([("a", pa.int8()), ("b", pa.string())]), "018100"),
    ],
)
def test_the_bytes_of_a_key(value, type_, expected):
    assert one(value, type_) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", "0000"), ("a", "610000"), ("\0", "00ff0000"), ("a\0", "6100ff0000")],
)
def test_the_bytes_of_a_string_that_is_not_the_last(value, expected):
    assert one(value, pa.string(), last=False) == expected
    assert one(value.encode(), pa.binary(), last=False) == expected


def test_every_nan_is_the_same_key():
    nans = [0x7FF8000000000000, 0x7FF8000000000123, 0xFFF8000000000000, 0x7FF0000000000001]
    array = pa.array(np.array(nans, np.uint64).view(np.float64))
    assert len(set(encode_keys([array]).to_pylist())) == 1


def test_a_single_string_column_is_not_copied():
    array = pa.array(["abc", "de", ""], pa.large_string())
    assert encode_keys([array]).buffers()[2].address == array.buffers()[2].address


def test_many_rows_of_several_components():
    generator = np.random.default_rng(8)
    n = 5_000
    alphabet = np.array([0, 0, 0xFF, 0x61], np.uint8)
    texts = [alphabet[generator.integers(0, 4, k)].tobytes() for k in generator.integers(0, 9, n)]
    null = generator.random(n) < 0.3
    columns = [
        pa.array(texts, pa.binary()),
        pa.array(generator.integers(-9, 9, n), mask=null),
        pa.array(texts[::-1], pa.binary(), mask=null),
        pa.array(generator.integers(-(2**15), 2**15, n), pa.int16()),
    ]
    keys = [
        columns[0],
        pa.StructArray.from_arrays([columns[2], columns[1]], ["t", "u"]),
        columns[3],
        pa.StructArray.from_arrays([columns[1], columns[2]], ["t", "u"]),
    ]
    encoded = encode_keys(keys)
    decoded = decode_keys(encoded, [key.type for key in keys])
    assert all(a == b for a, b in zip(decoded, keys, strict=True))
    types = [pa.binary(), keys[1].type, pa.int16(), keys[3].type]
    rows = zip(*(key.to_pylist() for key in keys), strict=True)
    expected = [
        b"".join(
            encode_one(type_, tuple(v.values()) if isinstance(v, dict) else v, i == 3)
            for i, (type_, v) in enumerate(zip(types, row, strict=True))
        )
        for row in rows
    ]
    assert encoded.to_pylist() == expected


# --- Refused ----------------------------------------------------------------------------------

PAIR = pa.struct([("a", pa.int8()), ("b", pa.string())])


@pytest.mark.parametrize(
    ("raw", "types", "offset", "why"),
    [
        ("80", [pa.int16()], 0, "needs 2 bytes"),
        ("", [pa.bool_()], 0, "needs 1 byte"),
        ("800000", [pa.int16()], 2, "follow the end"),
        ("02", [pa.bool_()], 0, "neither 00 nor 01"),
        ("fff8000000000001", [pa.float64()], 0, "NaN"),
        ("0007ffffffffffff", [pa.float64()], 0, "NaN"),
        ("ff", [pa.string()], 0, "UTF-8"),
        ("6180", [pa.string()], 0, "UTF-8"),
        ("6161", [pa.string(), pa.string()], 0, "no end"),
        ("616100", [pa.string(), pa.string()], 0, "no end"),
        ("610061000000", [pa.binary(), pa.int8()], 1, "not escaped"),
        ("02", [PAIR], 0, "presence of field 'a'"),
        ("0180", [PAIR], 2, "presence of field 'b' needs"),
        ("018005", [PAIR], 2, "presence of field 'b'"),
        ("01", [pa.struct([("n", pa.null())])], 0, "misplaced"),
        ("00", [pa.struct([pa.field("a", pa.int8(), nullable=False)])], 0, "misplaced"),
        ("ff" * 16, [pa.decimal128(38, 0)], 0, "beyond decimal128"),
        ("8" + "0" * 27 + "03e8", [pa.decimal128(3, 0)], 0, "beyond decimal128"),
        ("7f" + "f" * 26 + "fc18", [pa.decimal128(3, 0)], 0, "beyond decimal128"),
    ],
)
def test_malformed_bytes_are_refused_with_row_and_offset(raw, types, offset, why):
    good = encode_keys([zero(type_) for type_ in types])[0].as_py()
    rows = pa.array([good, good, bytes.fromhex(raw), good], pa.large_binary())
    with pytest.raises(SnapshotCorrupted, match=f"row 2, offset {offset}: .*{why}"):
        decode_keys(rows, types)
    with pytest.raises(SnapshotCorrupted, match=f"row 1, offset {offset}: .*{why}"):
        decode_keys(rows[1:], types)


def zero(type_):
    """One good key of the type."""
    values = {
        pa.string(): "",
        pa.binary(): b"",
        PAIR: {"a": None, "b": None},
        pa.struct([("n", pa.null())]): {"n": None},
        pa.struct([pa.field("a", pa.int8(), nullable=False)]): {"a": 1},
    }
    return pa.array([values.get(type_, False if type_ == pa.bool_() else 0)], type_)


def test_a_decimal_of_the_most_digits_is_accepted():
    values = [999, -999, 0]
    array = column(pa.decimal128(3, 0), values)
    assert decode_keys(encode_keys([array]), [array.type])[0] == array


def test_a_null_encoded_key_is_refused():
    with pytest.raises(SnapshotCorrupted, match="row 1, offset 0: it is null"):
        decode_keys(pa.array([b"\0", None], pa.large_binary()), [pa.bool_()])


def test_null_keys_are_refused_and_the_row_named():
    with pytest.raises(InvalidArgument, match="the key is null in row 1"):
        encode_keys([pa.array([1, None])])
    with pytest.raises(InvalidArgument, match="component 1 of the key is null in row 0"):
        encode_keys([pa.array([1]), pa.array([None], pa.string())])
    with pytest.raises(InvalidArgument, match="null in row 1"):
        encode_keys([pa.array([{"a": 1}, None])])


def test_strings_that_are_not_utf8_are_refused_and_the_row_named():
    array = pa.array([b"a", None, b"\xff"], pa.binary()).view(pa.string())
    with pytest.raises(InvalidArgument, match=r"the key in row 1: .*UTF-8"):
        encode_keys([array.drop_null()])
    nested = pa.StructArray.from_arrays([array], ["s"])
    with pytest.raises(InvalidArgument, match=r"component 0 of the key in row 2: .*UTF-8"):
        encode_keys([nested, pa.array([1, 2, 3])])


@pytest.mark.parametrize(
    "type_",
    [
        pa.null(),
        pa.uint8(),
        pa.float16(),
        pa.list_(pa.int8()),
        pa.struct([]),
        pa.struct([("a", pa.list_(pa.int8()))]),
        pa.duration("s"),
        pa.decimal256(50, 0),
        pa.dictionary(pa.int8(), pa.uint8()),
    ],
    ids=str,
)
def test_types_without_an_encoding_are_refused(type_):
    with pytest.raises(InvalidArgument, match="not supported"):
        encode_keys([pa.array([], type_)])
    with pytest.raises(InvalidArgument, match="not supported"):
        decode_keys(pa.array([], pa.binary()), [type_])


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (functools.partial(encode_keys, []), "at least one component"),
        (functools.partial(encode_keys, [pa.array([1]), pa.array([1, 2])]), "length"),
        (functools.partial(encode_keys, [[1]]), "pyarrow"),
        (functools.partial(decode_keys, pa.array([b""]), []), "at least one component"),
        (functools.partial(decode_keys, pa.array(["a"]), [pa.string()]), "binary"),
        (functools.partial(decode_keys, b"a", [pa.string()]), "pyarrow"),
    ],
)
def test_wrong_arguments_are_refused(call, why):
    with pytest.raises(InvalidArgument, match=why):
        call()


def test_more_distinct_keys_than_dictionary_indices_are_refused():
    encoded = encode_keys([pa.array(range(200), pa.int32())])
    with pytest.raises(InvalidArgument, match="200 distinct"):
        decode_keys(encoded, [pa.dictionary(pa.int8(), pa.int32())])


@pytest.mark.parametrize("type_", LEAVES, ids=str)
def test_no_rows(type_):
    encoded = encode_keys([column(type_, [])])
    assert len(encoded) == 0
    assert decode_keys(encoded, [type_])[0].type == type_
    assert len(encode_keys([pa.chunked_array([], type_)])) == 0
