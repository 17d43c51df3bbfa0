"""FORMAT.md is the authority: its vectors and examples hold, read out of the text."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import re
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import keygroups as kg
from keygroups.hashing import key_groups_of_hashes
from keygroups.keys import decode_keys, encode_keys
from keygroups.snapshot import manifest, types
from keygroups.snapshot.digest import digest_bytes, digest_rows
from keygroups.snapshot.rows import decode_rows, encode_rows

TEXT = (Path(manifest.__file__).parent / "FORMAT.md").read_text()
MAX_PARALLELISMS = (128, 4096, 32768)


def rows_of_table(name: str) -> list[list[str]]:
    """The cells of the table that follows the marker ``<!-- vectors: name -->``."""
    lines = TEXT.split(f"<!-- vectors: {name} -->\n", 1)[1].splitlines()
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip().strip("`") for cell in line.strip("|").split(" | ")])
    return table[2:]


KEYS, ROWS = rows_of_table("keys"), rows_of_table("rows")


def value_of(json_type: Any, value: Any) -> Any:
    """The Python value that a vector's JSON stands for."""
    if value is None:
        return None
    name = json_type["type"] if isinstance(json_type, dict) else json_type
    convert = {
        "binary": bytes.fromhex,
        "float32": float,
        "float64": float,
        "uuid": lambda text: uuid.UUID(text).bytes,
        "date32": dt.date.fromisoformat,
        "decimal128": decimal.Decimal,
        "timestamp": dt.datetime.fromisoformat,
        "map": lambda entries: [tuple(entry) for entry in entries],
        "struct": lambda fields: {
            field["name"]: value_of(field["type"], item)
            for field, item in zip(json_type["fields"], fields, strict=True)
        },
    }
    return convert.get(name, lambda same: same)(value)


def column_of(json_type: Any, value: Any) -> pa.Array:
    return pa.array([value_of(json_type, value)], types.type_from_json(json_type))


def test_there_are_vectors() -> None:
    assert len(KEYS) >= 25
    assert len(ROWS) >= 10


@pytest.mark.parametrize("row", KEYS, ids=lambda row: f"{row[0]} {row[1]}")
def test_key_vectors(row: list[str]) -> None:
    json_type, value, key_bytes, *hashes = row
    keys = column_of(json.loads(json_type), json.loads(value))
    encoded = encode_keys([keys])
    assert encoded[0].as_py().hex() == key_bytes
    assert encode_keys(decode_keys(encoded, [keys.type])).equals(encoded)
    for place, scheme in enumerate(("flink", "murmur3", "spark")):
        stated_hash, stated_groups = hashes[2 * place], hashes[2 * place + 1]
        if stated_hash == "-":
            with pytest.raises(kg.InvalidArgument):
                kg.hash_keys(keys, scheme)
            continue
        key_hash = kg.hash_keys(keys, scheme)
        assert str(key_hash[0]) == stated_hash
        groups = [key_groups_of_hashes(key_hash, m, scheme)[0] for m in MAX_PARALLELISMS]
        assert "/".join(map(str, groups)) == stated_groups


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_vectors(row: list[str]) -> None:
    columns = [column_of(*column) for column in json.loads(row[0])]
    encoded = encode_rows(columns, 1)
    assert encoded[0].as_py().hex() == row[1]
    assert f"{digest_rows(columns, 1)[0]:016x}" == row[2]
    assert [c.to_pylist() for c in decode_rows(encoded, [c.type for c in columns])] == [
        c.to_pylist() for c in columns
    ]


def test_example_manifest_is_valid_but_for_its_digest() -> None:
    example = re.search(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert example is not None
    covered = example[1][: example[1].rindex('  "digest"')].encode()
    data = covered + f'  "digest": "{digest_bytes(covered)}"\n}}\n'.encode()
    parsed = manifest.Manifest.from_bytes(data, "example")
    assert parsed.operators[0].ranges == (kg.KeyGroupRange(0, 63), kg.KeyGroupRange(64, 127))
    assert manifest.Manifest.from_bytes(parsed.to_bytes(), "again") == parsed


def test_documented_types_are_those_of_the_code() -> None:
    section = TEXT.split("### Types", 1)[1].split("###", 1)[0]
    documented = set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    )
    known = set(types.PLAIN) | set(types.PARAMETRIC)
    ranges = {"int16", "int32", "uint16", "uint32", "float32"}  # written as "int8 … int64"
    assert documented | ranges == known


def test_documented_limits_are_those_of_the_code() -> None:
    assert f"at most {manifest.MANIFEST_SIZE_LIMIT_BYTES >> 20} MiB" in TEXT
    assert f"at most {manifest.NAME_LENGTH_LIMIT} characters" in TEXT
    assert f"nest at most {types.NESTING_LIMIT} deep" in TEXT
    assert f'"{manifest.FORMAT_NAME}"' in TEXT
