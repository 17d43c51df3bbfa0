"""``keygroups inspect``: what a snapshot holds, and what another cut would do for it."""

from __future__ import annotations

from collections.abc import Iterator

import click
import numpy as np
import pyarrow as pa

from keygroups.assignment import UPPER_BOUND_MAX_PARALLELISM, balanced_cut, key_group_ranges
from keygroups.cli.keys import type_name
from keygroups.cli.measure import (
    MEASURES,
    balance_table,
    describe_balance,
    describe_ranges,
    heaviest_to_mean,
)
from keygroups.cli.output import (
    Block,
    Document,
    Output,
    Table,
    count,
    output_option,
    plural,
    ratio,
    size,
    span,
)
from keygroups.snapshot.manifest import Operator, State
from keygroups.snapshot.reader import Snapshot

HEAVIEST_SHOWN = 10


@click.command(short_help="Show ranges, sizes and skew.")
@click.argument("snapshot", metavar="SNAPSHOT", type=click.Path())
@click.option("--key-groups", is_flag=True, help="Every key group, not the 10 heaviest.")
@output_option
def inspect(snapshot: str, *, key_groups: bool, output: Output) -> None:
    """Show operators, states, ranges and skew, without reading a row.

    "data" is the size of the rows before compression; "on disk" that of the files.

    Example: keygroups inspect SNAPSHOT --key-groups
    """
    opened = Snapshot.open(snapshot)
    manifest = opened.manifest
    operators = [_describe_operator(opened, o, key_groups) for o in manifest.operators]
    document = {
        "snapshot": snapshot,
        "snapshot_id": manifest.snapshot_id,
        "created_at": manifest.created_at,
        "rows": sum(operator["rows"] for operator in operators),
        "size_bytes": sum(operator["size_bytes"] for operator in operators),
        "files": len(manifest.files),
        "file_bytes": sum(file.size_bytes for file in manifest.files),
        "operators": operators,
    }
    output.show(document, _text)


def _describe_operator(snapshot: Snapshot, operator: Operator, all_groups: bool) -> Document:
    sizes = snapshot.key_group_sizes(uid=operator.uid)
    ranges = describe_ranges(sizes, operator.ranges)
    totals = {measure: int(sizes.column(measure).to_numpy().sum()) for measure in MEASURES}
    groups = _describe_groups(sizes, totals, None if all_groups else HEAVIEST_SHOWN)
    return {
        "uid": operator.uid,
        "scheme": operator.scheme,
        "max_parallelism": operator.max_parallelism,
        "parallelism": operator.parallelism,
        "epoch": operator.epoch,
        "watermark_ms": operator.watermark_ms,
        "key": _describe_fields(operator.key),
        "states": [_describe_state(snapshot, operator, state) for state in operator.states],
        **totals,
        "ranges": ranges,
        "balance": describe_balance(ranges),
        "empty_key_groups": int(np.count_nonzero(sizes.column("rows").to_numpy() == 0)),
        "key_groups" if all_groups else "heaviest_key_groups": groups,
        "options": _describe_options(sizes, operator),
    }


def _describe_state(snapshot: Snapshot, operator: Operator, state: State) -> Document:
    sizes = snapshot.key_group_sizes(state.name, operator.uid)
    segments = [segment for run in state.runs for segment in run.segments]
    return {
        "name": state.name,
        "kind": state.kind,
        "backend": state.backend,
        "columns": _describe_fields(state.fields),
        "rows": sum(segment.rows for segment in segments),
        "size_bytes": int(sizes.column("size_bytes").to_numpy().sum()),
        "runs": len(state.runs),
        "files": len(segments),
        "file_bytes": sum(segment.file.size_bytes for segment in segments),
    }


def _describe_fields(fields: tuple[pa.Field, ...]) -> list[Document]:
    return [
        {"name": field.name, "type": type_name(field.type), "nullable": field.nullable}
        for field in fields
    ]


def _describe_groups(sizes: pa.Table, totals: Document, limit: int | None) -> list[Document]:
    """All key groups in order, or the heaviest by bytes, then rows."""
    rows, size_bytes = (sizes.column(measure).to_numpy() for measure in MEASURES)
    chosen = np.arange(len(rows))
    if limit is not None:
        chosen = np.lexsort((-rows, -size_bytes))[:limit]
        chosen = chosen[rows[chosen] > 0]
    return [
        {
            "key_group": group,
            "rows": int(rows[group]),
            "size_bytes": int(size_bytes[group]),
            "rows_share": _share(int(rows[group]), totals["rows"]),
            "size_bytes_share": _share(int(size_bytes[group]), totals["size_bytes"]),
        }
        for group in chosen.tolist()
    ]


def _describe_options(sizes: pa.Table, operator: Operator) -> Document:
    """How even the ranges would be under other cuts, and at most under any."""
    groups, parallelism = operator.max_parallelism, operator.parallelism
    weights = {measure: sizes.column(measure).to_numpy() for measure in MEASURES}
    cuts = {
        "flink_cut": key_group_ranges(groups, parallelism),
        "balance_rows": balanced_cut(weights["rows"], parallelism),
        "balance_bytes": balanced_cut(weights["size_bytes"], parallelism),
    }
    exponents = range(7, UPPER_BOUND_MAX_PARALLELISM.bit_length())
    return {
        **{name: describe_balance(describe_ranges(sizes, cut)) for name, cut in cuts.items()},
        # One key group lies in one range, so no cut is more even than this.
        "heaviest_key_group_ratio": {
            measure: _heaviest_group_ratio(values.tolist(), parallelism)
            for measure, values in weights.items()
        },
        "max_parallelism_if_keys_are_even": [
            {"max_parallelism": m, "ratio": _count_ratio(m, parallelism)}
            for m in (1 << exponent for exponent in exponents)
            if m >= parallelism
        ],
    }


def _heaviest_group_ratio(weights: list[int], parallelism: int) -> float | None:
    total = sum(weights)
    return round(max(weights) * parallelism / total, 6) if total else None


def _count_ratio(max_parallelism: int, parallelism: int) -> float | None:
    return heaviest_to_mean([len(r) for r in key_group_ranges(max_parallelism, parallelism)])


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def _text(document: Document) -> Iterator[Block]:
    yield f"snapshot {document['snapshot']}"
    yield f"  id {document['snapshot_id']}, created {document['created_at']}"
    yield (
        f"  {plural(document['rows'], 'row')}, {size(document['size_bytes'])} of data in "
        f"{plural(document['files'], 'file')} of {size(document['file_bytes'])}"
    )
    for operator in document["operators"]:
        yield ""
        yield from _operator_text(operator)


def _operator_text(operator: Document) -> Iterator[Block]:
    yield (
        f"operator {operator['uid']!r}: parallelism {operator['parallelism']} of max parallelism "
        f"{operator['max_parallelism']}, scheme {operator['scheme']}, epoch {operator['epoch']}"
    )
    if operator["watermark_ms"] is not None:
        yield f"  watermark {operator['watermark_ms']} ms"
    yield f"  key: {_columns_text(operator['key'])}"
    for state in operator["states"]:
        yield f"  state {state['name']!r}: {_columns_text(state['columns']) or 'no columns'}"
        yield (
            f"    {state['kind']}, {state['backend']}: {plural(state['rows'], 'row')}, "
            f"{size(state['size_bytes'])} of data in {plural(state['files'], 'file')} of "
            f"{size(state['file_bytes'])} ({plural(state['runs'], 'run')})"
        )
    yield ""
    yield Table(
        ("range", "key groups", "rows", "data"),
        [
            (str(r["index"]), span(r["key_groups"]), count(r["rows"]), size(r["size_bytes"]))
            for r in operator["ranges"]
        ],
        left=2,
    )
    yield ""
    yield from _groups_text(operator)
    yield ""
    yield from _options_text(operator)


def _columns_text(fields: list[Document]) -> str:
    return ", ".join(
        f"{field['name']} {field['type']}{'' if field['nullable'] else ' not null'}"
        for field in fields
    )


def _groups_text(operator: Document) -> Iterator[Block]:
    groups = operator.get("key_groups", operator.get("heaviest_key_groups"))
    title = "key groups" if "key_groups" in operator else "heaviest key groups"
    empty = f"{operator['empty_key_groups']} of {operator['max_parallelism']} are empty"
    if not groups:
        yield f"key groups: {empty}"
        return
    yield Table(
        ("key group", "rows", "of all", "data", "of all"),
        [
            (
                str(group["key_group"]),
                count(group["rows"]),
                _percent(group["rows_share"]),
                size(group["size_bytes"]),
                _percent(group["size_bytes_share"]),
            )
            for group in groups
        ],
        title=f"{title} ({empty})",
    )


def _options_text(operator: Document) -> Iterator[Block]:
    options, parallelism = operator["options"], operator["parallelism"]
    yield balance_table(
        f"skew at parallelism {parallelism}: the heaviest range against the mean",
        {
            "now": operator["balance"],
            "Flink's cut": options["flink_cut"],
            "--balance rows": options["balance_rows"],
            "--balance bytes": options["balance_bytes"],
        },
    )
    least = options["heaviest_key_group_ratio"]
    if least["rows"] is not None:
        yield (
            f"the heaviest key group has {ratio(least['rows'])} times the rows and "
            f"{ratio(least['size_bytes'])} times the data of a mean range; no cut has a lower ratio"
        )
    yield ""
    even = options["max_parallelism_if_keys_are_even"]
    yield Table(
        ("max parallelism", *(str(option["max_parallelism"]) for option in even)),
        [("ratio", *(ratio(option["ratio"]) for option in even))],
        title="other max parallelisms, if keys were even: an estimate from key groups a range",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
