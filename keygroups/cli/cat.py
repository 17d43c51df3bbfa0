"""``keygroups cat``: rows of a snapshot, all or some."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.cli.keys import parse_keys
from keygroups.cli.output import Output, output_option
from keygroups.errors import InvalidArgument
from keygroups.snapshot.manifest import Operator
from keygroups.snapshot.reader import Snapshot

_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which key groups are wanted; at most one of the three is given.

    Attributes:
        key_groups: Single ones.
        range: ``A-B``, both inclusive.
        subtask: Those of this subtask.
    """

    key_groups: tuple[int, ...]
    range: str | None
    subtask: int | None

    def ranges(self, operator: Operator) -> list[KeyGroupRange]:
        """Returns the key groups as ranges, ascending.

        Raises:
            InvalidArgument: If more than one is given, or they are not the operator's.
        """
        if bool(self.key_groups) + (self.range is not None) + (self.subtask is not None) > 1:
            raise InvalidArgument("give one of --key-group, --range and --subtask")
        if self.key_groups:
            return [KeyGroupRange(group, group) for group in sorted(set(self.key_groups))]
        if self.range is not None:
            return [_parse_range(self.range)]
        if self.subtask is None:
            return [KeyGroupRange(0, operator.max_parallelism - 1)]
        if self.subtask >= operator.parallelism:
            raise InvalidArgument(
                f"subtask {self.subtask} is not within [0, {operator.parallelism - 1}]"
            )
        return [operator.ranges[self.subtask]]


@click.command(short_help="Print rows.")
@click.argument("snapshot", metavar="SNAPSHOT", type=click.Path())
@click.option("--key", "keys", multiple=True, help="Rows of this key; may be repeated.")
@click.option(
    "--key-group",
    "key_groups",
    multiple=True,
    type=click.IntRange(0),
    metavar="G",
    help="Rows of this key group; may be repeated.",
)
@click.option("--range", metavar="A-B", help="Rows of key groups A to B, both inclusive.")
@click.option("--subtask", type=click.IntRange(0), metavar="I", help="Rows of this subtask.")
@click.option("--state", metavar="NAME", help="The state, if there are several.")
@click.option("--uid", metavar="UID", help="The operator, if there are several.")
@click.option("--columns", metavar="A,B", help="These columns, in this order.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="The first N rows.")
@click.option(
    "--format", "form", type=click.Choice(["text", "jsonl", "csv"]), help="How rows are streamed."
)
@output_option
def cat(
    snapshot: str,
    *,
    keys: tuple[str, ...],
    key_groups: tuple[int, ...],
    range: str | None,
    subtask: int | None,
    state: str | None,
    uid: str | None,
    columns: str | None,
    limit: int | None,
    form: str | None,
    output: Output,
) -> None:
    """Print rows in snapshot order: by key group, key hash and key.

    A key is written as it is printed; one of several columns is a JSON array: '["a", 1]'.
    --output json prints {"snapshot", "uid", "state", "rows": [...]} at the end, --format jsonl
    one object a line as it comes. Dates and times are ISO 8601, decimals strings, binary
    hexadecimal, NaN and infinities strings.

    Example: keygroups cat SNAPSHOT --subtask 0 --columns id,total --limit 5
    """
    if form and output.is_json:
        raise InvalidArgument(f"--output json is one document; leave out --format {form}")
    opened = Snapshot.open(snapshot)
    operator, found = opened.operator(uid), opened.state(state, uid)
    schema = opened.schema(found.name, operator.uid)
    names = ["key_group", *(_split(columns) if columns is not None else schema.user.names)]
    names = list(dict.fromkeys(names))
    wanted = parse_keys(keys, operator.key_type) if keys else None
    ranges = Selection(key_groups, range, subtask).ranges(operator)
    readers = [
        opened.to_batches(part, found.name, names, uid=operator.uid, keys=wanted) for part in ranges
    ]
    head = {"snapshot": snapshot, "uid": operator.uid, "state": found.name}
    selected = pa.schema([schema.stored.field(name) for name in names])
    _print(output, form or "text", head, selected, readers, limit)


def _print(
    output: Output,
    form: str,
    head: dict[str, str],
    schema: pa.Schema,
    readers: Sequence[Iterator[pa.RecordBatch]],
    limit: int | None,
) -> None:
    from keygroups.cli import rows

    batches = rows.first_rows((batch for reader in readers for batch in reader), limit)
    if output.is_json:
        rows.write_json_document(head, "rows", batches)
    elif form == "jsonl":
        rows.write_json_lines(batches)
    elif form == "csv":
        rows.write_csv(schema, batches)
    else:
        rows.write_text(schema, batches)


def _parse_range(text: str) -> KeyGroupRange:
    found = _RANGE.fullmatch(text)
    if not found or int(found[2]) < int(found[1]):
        raise InvalidArgument(f"--range {text!r:.50} is not A-B with A <= B, such as 0-31")
    return KeyGroupRange(int(found[1]), int(found[2]))


def _split(columns: str) -> list[str]:
    """Names joined by commas; one that has a comma itself is quoted as in CSV."""
    return next(csv.reader([columns], skipinitialspace=True), [])
