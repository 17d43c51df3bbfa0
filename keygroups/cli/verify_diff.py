"""``keygroups verify`` and ``keygroups diff``: exit code 1 says that there are findings."""

from __future__ import annotations

from collections.abc import Iterator

import click

from keygroups.assignment import KeyGroupRange
from keygroups.cli.output import (
    Block,
    Document,
    Output,
    Table,
    count,
    output_option,
    plural,
    size,
    span,
)
from keygroups.cli.values import json_values, value_text
from keygroups.snapshot.diff import StateDiff
from keygroups.snapshot.diff import diff as diff_snapshots
from keygroups.snapshot.verify import verify as verify_snapshot

FINDINGS = 1
UNREFERENCED_SHOWN = 10
GROUPS_SHOWN = 20


@click.command(short_help="Check every byte, row and count.")
@click.argument("snapshot", metavar="SNAPSHOT", type=click.Path())
@output_option
def verify(snapshot: str, *, output: Output) -> int:
    """Read a whole snapshot and check every byte, row and count.

    Exits with 1 if something is wrong, with 3 if manifest or index are so damaged that nothing
    can be checked.

    Example: keygroups verify SNAPSHOT
    """
    with output.progress("verifying") as progress:
        result = verify_snapshot(snapshot, progress=progress)
    document = {
        "snapshot": snapshot,
        "ok": result.is_ok,
        "files": result.files,
        "rows": result.rows,
        "size_bytes": result.size_bytes,
        "findings": [
            {
                "path": finding.path,
                "key_groups": _bounds(finding.key_groups),
                "message": finding.message,
            }
            for finding in result.findings
        ],
        "unreferenced": list(result.unreferenced),
    }
    output.show(document, _verify_text)
    return 0 if result.is_ok else FINDINGS


@click.command(short_help="Compare two snapshots.")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    metavar="N",
    help="How many different keys of each state to name; all are counted.",
)
@output_option
def diff(a: str, b: str, *, limit: int, output: Output) -> int:
    """Compare keys and values of two snapshots, whatever their ranges and backends.

    Exits with 1 if they differ. Where the max parallelisms differ, key groups are numbered by
    their greatest common divisor.

    Example: keygroups diff BEFORE AFTER --limit 100
    """
    result = diff_snapshots(a, b, row_limit=limit)
    document = {
        "a": a,
        "b": b,
        "equal": result.is_equal,
        "states": [_describe_state(state) for state in result.states],
        "states_only_in_a": [{"uid": uid, "state": name} for uid, name in result.only_in_a],
        "states_only_in_b": [{"uid": uid, "state": name} for uid, name in result.only_in_b],
    }
    output.show(document, _diff_text)
    return 0 if result.is_equal else FINDINGS


def _bounds(key_groups: KeyGroupRange) -> list[int]:
    return [key_groups.start, key_groups.end]


def _describe_state(state: StateDiff) -> Document:
    names = [name for name in state.rows.column_names if name not in {"change", "key_group"}]
    rows = state.rows.combine_chunks()
    changes, groups = (rows.column(name).to_pylist() for name in ("change", "key_group"))
    columns = [json_values(rows.column(name).combine_chunks()) for name in names]
    keys = [dict(zip(names, key, strict=True)) for key in zip(*columns, strict=True)]
    return {
        "uid": state.uid,
        "state": state.state,
        "equal": state.is_equal,
        "compared_key_groups": state.compared,
        "different_key_groups": list(state.different),
        "only_in_a": state.only_in_a,
        "only_in_b": state.only_in_b,
        "changed": state.changed,
        "keys": [
            {"change": change.replace(" ", "_"), "key_group": group, "key": key}
            for change, group, key in zip(changes, groups, keys, strict=True)
        ],
    }


def _verify_text(document: Document) -> Iterator[Block]:
    for finding in document["findings"]:
        yield f"{finding['path']} (key groups {span(finding['key_groups'])})"
        yield f"  {finding['message']}"
    if document["findings"]:
        yield ""
    yield (
        f"{plural(len(document['findings']), 'finding')} in {plural(document['files'], 'file')}, "
        f"{plural(document['rows'], 'row')}, {size(document['size_bytes'])}"
    )
    unreferenced = document["unreferenced"]
    if unreferenced:
        yield (
            f"{plural(len(unreferenced), 'file')} that no manifest names, harmless; see "
            f"`keygroups gc`:"
        )
        yield from (f"  {path}" for path in unreferenced[:UNREFERENCED_SHOWN])
        if len(unreferenced) > UNREFERENCED_SHOWN:
            yield f"  and {len(unreferenced) - UNREFERENCED_SHOWN:,} more"


def _diff_text(document: Document) -> Iterator[Block]:
    yield f"a: {document['a']}"
    yield f"b: {document['b']}"
    for side in ("a", "b"):
        for only in document[f"states_only_in_{side}"]:
            yield f"only in {side}: state {only['state']!r} of operator {only['uid']!r}"
    if document["states"]:
        yield ""
        yield Table(
            ("operator", "state", "key groups", "different", "only in a", "only in b", "changed"),
            [
                (
                    state["uid"],
                    state["state"],
                    count(state["compared_key_groups"]),
                    count(len(state["different_key_groups"])),
                    count(state["only_in_a"]),
                    count(state["only_in_b"]),
                    count(state["changed"]),
                )
                for state in document["states"]
            ],
            left=2,
        )
    for state in document["states"]:
        yield from _differences(state)
    yield ""
    yield "equal: the same keys and values" if document["equal"] else "different"


def _differences(state: Document) -> Iterator[Block]:
    groups, keys = state["different_key_groups"], state["keys"]
    if not groups:
        return
    shown = ", ".join(map(str, groups[:GROUPS_SHOWN]))
    more = f" and {len(groups) - GROUPS_SHOWN:,} more" if len(groups) > GROUPS_SHOWN else ""
    yield ""
    yield f"state {state['state']!r} of operator {state['uid']!r}: key groups {shown}{more}"
    if keys:
        yield Table(
            ("change", *keys[0]["key"], "key group"),
            [
                (
                    key["change"].replace("_", " "),
                    *map(value_text, key["key"].values()),
                    str(key["key_group"]),
                )
                for key in keys
            ],
            left=1 + len(keys[0]["key"]),
        )
    unnamed = state["only_in_a"] + state["only_in_b"] + state["changed"] - len(keys)
    if unnamed:
        yield f"and {plural(unnamed, 'key')} more; --limit names them"
