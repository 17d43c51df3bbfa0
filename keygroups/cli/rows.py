"""Rows on stdout: streamed as aligned text, JSON lines or CSV, or whole as one JSON document."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import TextIO, cast

import pyarrow as pa

from keygroups.cli.output import Document, cell_width
from keygroups.cli.values import json_text, json_values, shortest_doubles, text_values

CHUNK_ROWS = 4096
MAX_PADDING = 40
SPOOL_MEMORY_BYTES = 16 << 20


def write_text(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Prints rows as text. Widths follow the first rows, so that nothing waits for the last."""
    chunks = _chunks(batches)
    rows = _text_rows(next(chunks, None))
    columns = [
        _TextColumn.fitting(field, cells)
        for field, cells in zip(schema, zip(schema.names, *rows, strict=True), strict=True)
    ]
    _write_aligned(columns, [tuple(schema.names)])
    _write_aligned(columns, rows)
    for chunk in chunks:
        _write_aligned(columns, _text_rows(chunk))


def write_json_lines(batches: Iterable[pa.RecordBatch]) -> None:
    """Prints each row as one JSON object on one line."""
    for line in _json_rows(batches):
        sys.stdout.write(f"{line}\n")


def write_csv(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Prints rows as CSV: strings quoted, null empty, lists and structs as JSON."""
    sys.stdout.write(_csv_text(schema.empty_table(), header=True))
    for chunk in _chunks(batches):
        sys.stdout.write(_csv_text(chunk, header=False))


def write_json_document(head: Document, member: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Prints one JSON object: the members of ``head``, then ``member``, the array of rows.

    Nothing is printed before the last row was read, so that an error leaves stdout empty.
    """
    with cast(
        "TextIO",
        SpooledTemporaryFile(
            SPOOL_MEMORY_BYTES, "w+", encoding="utf-8", errors="surrogatepass", newline=""
        ),
    ) as spool:
        opening = json.dumps(head, ensure_ascii=False, indent=2, allow_nan=False)
        spool.write(f'{opening.removesuffix("}").rstrip()},\n  "{member}": [')
        separator = "\n    "
        for line in _json_rows(batches):
            spool.write(separator + line)
            separator = ",\n    "
        spool.write("\n  ]\n}\n")
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout)


def first_rows(batches: Iterable[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yields no more than ``limit`` rows, and asks for no batch beyond them."""
    if limit is None:
        yield from batches
        return
    remaining = iter(batches)
    while limit > 0 and (batch := next(remaining, None)) is not None:
        yield batch.slice(0, limit)
        limit -= batch.num_rows


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small pieces, so that the first row comes soon and little is held as text."""
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            yield batch.slice(start, CHUNK_ROWS)


def _json_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
    for chunk in _chunks(batches):
        names = chunk.schema.names
        for row in zip(*map(json_values, chunk.columns), strict=True):
            yield json_text(dict(zip(names, row, strict=True)))


@dataclass(frozen=True, slots=True)
class _TextColumn:
    width: int
    is_number: bool

    @classmethod
    def fitting(cls, field: pa.Field, cells: Sequence[str]) -> _TextColumn:
        """A column as wide as its cells, but for a few that are very long."""
        t = pa.types
        name, *values = map(cell_width, cells)
        width = max(name, min(max(values, default=0), MAX_PADDING))
        is_number = (
            t.is_integer(field.type) or t.is_floating(field.type) or t.is_decimal(field.type)
        )
        return cls(width, is_number)


def _text_rows(chunk: pa.RecordBatch | None) -> list[tuple[str, ...]]:
    if chunk is None:
        return []
    return list(zip(*map(text_values, chunk.columns), strict=True))


def _write_aligned(columns: Sequence[_TextColumn], rows: Iterable[tuple[str, ...]]) -> None:
    for row in rows:
        padded = []
        for column, cell in zip(columns, row, strict=True):
            spaces = " " * (column.width - cell_width(cell))
            padded.append(spaces + cell if column.is_number else cell + spaces)
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _csv_text(chunk: pa.RecordBatch | pa.Table, *, header: bool) -> str:
    from pyarrow.csv import WriteOptions
    from pyarrow.csv import write_csv as write_arrow_csv

    columns = [
        _csv_column(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)
        for column in chunk.columns
    ]
    sink = pa.BufferOutputStream()
    table = pa.table(columns, names=chunk.schema.names)
    write_arrow_csv(table, sink, WriteOptions(include_header=header))
    text: str = sink.getvalue().to_pybytes().decode()
    return text


def _csv_column(column: pa.Array) -> pa.Array:
    t = pa.types
    if t.is_floating(column.type):
        return shortest_doubles(column)
    if t.is_duration(column.type):
        return column.cast(pa.int64())
    if any(check(column.type) for check in (t.is_integer, t.is_boolean, t.is_string)):
        return column
    values = [
        value if value is None or isinstance(value, str) else json_text(value)
        for value in json_values(column)
    ]
    return pa.array(values, pa.string())
