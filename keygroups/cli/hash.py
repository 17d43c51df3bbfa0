"""``keygroups hash``: where keys go."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice

import click
import numpy as np
import pyarrow as pa

from keygroups.assignment import check_max_parallelism, check_parallelism
from keygroups.cli.keys import parse_keys, parse_type, type_name
from keygroups.cli.output import Output, output_option
from keygroups.cli.values import json_text, json_values
from keygroups.errors import InvalidArgument
from keygroups.hashing import SCHEMES, check_key_type, hash_keys, key_groups_of_hashes

BATCH_ROWS = 1 << 16


@click.command("hash", short_help="Tell where keys go.")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--max-parallelism", type=int, required=True, metavar="M", help="Key groups.")
@click.option("--parallelism", type=int, metavar="P", help="Tell the subtask as well.")
@click.option("--scheme", type=click.Choice(SCHEMES), default="flink", show_default=True)
@click.option(
    "--type",
    "type_text",
    default="string",
    show_default=True,
    metavar="TYPE",
    help="Arrow type of the keys; several joined by commas for composite keys.",
)
@output_option
def hash_command(
    keys: tuple[str, ...],
    *,
    max_parallelism: int,
    parallelism: int | None,
    scheme: str,
    type_text: str,
    output: Output,
) -> None:
    """Tell hash, key group and subtask of keys.

    Keys come from the arguments, or a line each from standard input. They are strings unless
    --type says otherwise: int32, int64, date, timestamp[us], 'decimal128(10, 2)', uuid ... A
    key of several columns is written as a JSON array. Put -- before a key that begins with a
    dash. The subtask is that of Flink's formula, not of a balanced cut.

    Example: keygroups hash --max-parallelism 128 --parallelism 4 --type string,int64 '["a", 1]'
    """
    from keygroups.cli import rows

    check_max_parallelism(max_parallelism)
    if parallelism is not None:
        check_parallelism(max_parallelism, parallelism)
    data_type = parse_type(type_text)
    check_key_type(data_type, scheme)
    batches = (
        _hashed(parse_keys(texts, data_type), max_parallelism, parallelism, scheme)
        for texts in _texts(keys)
    )
    if output.is_json:
        head = {
            "scheme": scheme,
            "type": type_name(data_type),
            "max_parallelism": max_parallelism,
            "parallelism": parallelism,
        }
        rows.write_json_document(head, "keys", batches)
        return
    rows.write_text(_schema(data_type, parallelism), batches)


def _schema(data_type: pa.DataType, parallelism: int | None) -> pa.Schema:
    shown = pa.string() if pa.types.is_struct(data_type) else data_type
    fields = [("key", shown), ("hash", pa.int32()), ("key_group", pa.uint16())]
    if parallelism is not None:
        fields.append(("subtask", pa.uint16()))
    return pa.schema(fields)


def _hashed(
    keys: pa.Array, max_parallelism: int, parallelism: int | None, scheme: str
) -> pa.RecordBatch:
    hashes = hash_keys(keys, scheme)
    groups = key_groups_of_hashes(hashes, max_parallelism, scheme)
    shown = keys
    if pa.types.is_struct(keys.type):  # as it is written: the JSON array of its parts
        shown = pa.array([json_text(list(key.values())) for key in json_values(keys)], pa.string())
    columns = [shown, hashes, pa.array(groups)]
    if parallelism is not None:  # for each group, not for each key
        every = np.arange(max_parallelism, dtype=np.int64)
        columns.append(pa.array((every * parallelism // max_parallelism).astype(np.uint16)[groups]))
    return pa.record_batch(columns, schema=_schema(keys.type, parallelism))


def _texts(keys: tuple[str, ...]) -> Iterable[list[str]]:
    if keys and keys != ("-",):
        return [list(keys)]
    if not keys and sys.stdin.isatty():
        raise click.UsageError("give keys, or - to type them, one a line")
    return _lines()


def _lines() -> Iterator[list[str]]:
    source = sys.stdin.buffer
    first_line = 1
    while lines := list(islice(source, BATCH_ROWS)):
        try:
            yield [line.removesuffix(b"\n").removesuffix(b"\r").decode() for line in lines]
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"standard input, line {first_line} or later, is not UTF-8: {error}"
            ) from None
        first_line += len(lines)
