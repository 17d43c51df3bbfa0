"""What every command shows, in two forms: one JSON document, or text for people.

A command makes a document (a ``dict`` of plain values) and a function that renders it as
blocks of text: lines and tables. On a terminal tables are drawn by rich; elsewhere they are
aligned with spaces, never cut or wrapped.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import click

Document: TypeAlias = dict[str, Any]
Progress: TypeAlias = Callable[[int, int], None]

UNKNOWN = "-"
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes:
        headers: One a column.
        rows: As many cells each.
        left: How many columns from the left are words; the others are numbers.
        title: Printed above it.
    """

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int = 1
    title: str = ""


Block: TypeAlias = str | Table
Render: TypeAlias = Callable[[Document], Iterable[Block]]


class Output:
    """Shows documents as text or as JSON on stdout, and talk on stderr.

    Attributes:
        is_json: Whether JSON is wanted.
    """

    def __init__(self, form: str) -> None:
        self.is_json = form == "json"

    def show(self, document: Document, render: Render) -> None:
        """Prints the document, or the text that ``render`` makes of it."""
        if self.is_json:
            json.dump(document, sys.stdout, ensure_ascii=False, indent=2, allow_nan=False)
            sys.stdout.write("\n")
            return
        for block in render(document):
            if isinstance(block, str):
                sys.stdout.write(f"{printable(block)}\n")
            elif sys.stdout.isatty():
                _draw(block)
            else:
                sys.stdout.writelines(f"{line}\n" for line in plain_lines(block))

    def hint(self, text: str) -> None:
        """Says something to a person, who is not there when JSON is wanted."""
        if not self.is_json:
            click.echo(printable(text), err=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress | None]:
        """Gives a callback ``progress(done, total)`` that draws a bar; none without a terminal."""
        if not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def output_option(command: _Command) -> _Command:
    """Adds ``--output``; the command gets an :class:`Output` named ``output``."""
    return click.option(
        "--output",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        callback=lambda _context, _parameter, form: Output(form),
        help="Text for people, or one JSON document.",
    )(command)


def printable(text: str) -> str:
    """Escapes what would move the cursor, break a line or turn its direction."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cell_width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def count(number: int | None) -> str:
    """``1234567`` as ``1,234,567``."""
    return UNKNOWN if number is None else f"{number:,}"


def size(size_bytes: float | None) -> str:
    """``1536`` as ``1.5 KiB``."""
    if size_bytes is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} PiB"


def ratio(number: float | None) -> str:
    """``1.2345`` as ``1.23``."""
    return UNKNOWN if number is None else f"{number:.2f}"


def span(key_groups: Sequence[int]) -> str:
    """``[0, 31]`` as ``0-31``, the form that ``--range`` takes; nothing if it is empty."""
    start, end = key_groups
    return UNKNOWN if end < start else f"{start}-{end}"


def plural(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plain_lines(table: Table) -> Iterator[str]:
    """Aligns a table with spaces."""
    grid = [table.headers, *(tuple(map(printable, row)) for row in table.rows)]
    widths = [max(map(cell_width, column)) for column in zip(*grid, strict=True)]
    if table.title:
        yield printable(table.title)
    for row in grid:
        padded = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            spaces = " " * (width - cell_width(cell))
            padded.append(cell + spaces if place < table.left else spaces + cell)
        yield "  ".join(padded).rstrip()


def _draw(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left")
    if table.title:
        drawn.title = Text(printable(table.title), style="bold")
    for place, header in enumerate(table.headers):
        drawn.add_column(header, justify="left" if place < table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    Console(file=sys.stdout).print(drawn)
