"""``keygroups rescale`` and ``keygroups plan``: another cut, carried out or only shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from keygroups.cli.measure import balance_table, describe_balance, describe_ranges
from keygroups.cli.output import (
    Block,
    Document,
    Output,
    Table,
    count,
    output_option,
    size,
    span,
)
from keygroups.rescale.execute import RescaleArguments, check_target
from keygroups.rescale.execute import rescale as rescale_snapshot
from keygroups.rescale.plan import ACTIONS, BALANCES, MODES, OperatorPlan, RangePlan, RescalePlan
from keygroups.snapshot.manifest import Operator
from keygroups.snapshot.reader import Snapshot

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _cut_options(command: _Command) -> _Command:
    """The options that say what the new cut is."""
    for option in (
        click.option(
            "--balance", type=click.Choice(BALANCES), help="Cut by weight, not by Flink's formula."
        ),
        click.option(
            "--mode",
            type=click.Choice(MODES),
            default="rewrite",
            show_default=True,
            help="rewrite: a self-contained copy. link: second names for the same files.",
        ),
        click.option("--max-parallelism", type=int, metavar="M", help="New number of key groups."),
        click.option("--parallelism", type=int, metavar="N", help="New number of ranges."),
    ):
        command = option(command)
    return command


@click.command(short_help="Write a snapshot anew with other ranges.")
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@_cut_options
@click.option("--dry-run", is_flag=True, help="Print the plan, touch nothing.")
@click.option("--overwrite", is_flag=True, help="Replace a snapshot at DST.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Threads.  [default: processors]")
@output_option
def rescale(
    source: str,
    target: str,
    *,
    parallelism: int | None,
    max_parallelism: int | None,
    mode: Any,
    balance: Any,
    dry_run: bool,
    overwrite: bool,
    jobs: int | None,
    output: Output,
) -> None:
    """Write the snapshot SRC to DST with another parallelism or max parallelism.

    SRC is only read. DST holds the same rows, which is proved before it becomes visible.

    Example: keygroups rescale SRC DST --parallelism 8 --balance bytes
    """
    arguments = _arguments(parallelism, max_parallelism, mode, balance)
    snapshot = Snapshot.open(source)
    if dry_run:
        check_target(snapshot, target, overwrite=overwrite)
        _show_plan(snapshot, arguments.plan(snapshot), source, target, output)
        return
    with output.progress("rescaling") as progress:
        result = rescale_snapshot(
            source,
            target,
            parallelism,
            max_parallelism,
            mode,
            balance,
            overwrite=overwrite,
            jobs=jobs,
            progress=progress,
        )
    document = {
        "source": source,
        "destination": target,
        "mode": mode,
        "snapshot_id": result.manifest.snapshot_id,
        "operators": [
            _describe_result(snapshot, before, result, after)
            for before, after in zip(
                snapshot.manifest.operators, result.manifest.operators, strict=True
            )
        ],
    }
    output.show(document, _result_text)


@click.command(short_help="Show what a rescale would do.")
@click.argument("source", metavar="SRC", type=click.Path())
@_cut_options
@output_option
def plan(
    source: str,
    *,
    parallelism: int | None,
    max_parallelism: int | None,
    mode: Any,
    balance: Any,
    output: Output,
) -> None:
    """Show what a rescale of SRC would do: files read and copied, balance before and after.

    Reads the manifest and the index, no rows. Sizes are those of whole files, also where only
    a part is read.

    Example: keygroups plan SRC --parallelism 8 --output json
    """
    arguments = _arguments(parallelism, max_parallelism, mode, balance)
    snapshot = Snapshot.open(source)
    _show_plan(snapshot, arguments.plan(snapshot), source, None, output)


def _arguments(
    parallelism: int | None, max_parallelism: int | None, mode: Any, balance: Any
) -> RescaleArguments:
    if parallelism is None and max_parallelism is None and balance is None:
        raise click.UsageError(
            "say what is to change: --parallelism, --max-parallelism or --balance"
        )
    return RescaleArguments(parallelism, max_parallelism, mode, balance)


def _describe_result(
    snapshot: Snapshot, before: Operator, result: Snapshot, after: Operator
) -> Document:
    ranges = describe_ranges(result.key_group_sizes(uid=after.uid), after.ranges)
    return {
        "uid": after.uid,
        "max_parallelism": after.max_parallelism,
        "parallelism": after.parallelism,
        "before": _describe_before(snapshot, before),
        "balance": describe_balance(ranges),
        "ranges": ranges,
    }


def _describe_before(snapshot: Snapshot, operator: Operator) -> Document:
    ranges = describe_ranges(snapshot.key_group_sizes(uid=operator.uid), operator.ranges)
    return {
        "max_parallelism": operator.max_parallelism,
        "parallelism": operator.parallelism,
        "balance": describe_balance(ranges),
    }


def _show_plan(
    snapshot: Snapshot, plan: RescalePlan, source: str, target: str | None, output: Output
) -> None:
    sizes = {_member(action): plan.bytes_of(action) for action in ACTIONS}
    document = {
        "source": source,
        "destination": target,
        "mode": plan.mode,
        "read_bytes": sum(sizes.values()) - sizes["link_bytes"],
        **sizes,
        "operators": [_describe_plan(snapshot, operator) for operator in plan.operators],
    }
    output.show(document, _plan_text)


def _describe_plan(snapshot: Snapshot, plan: OperatorPlan) -> Document:
    ranges = [_describe_range(index, planned) for index, planned in enumerate(plan.ranges)]
    return {
        "uid": plan.operator.uid,
        "max_parallelism": plan.max_parallelism,
        "parallelism": len(plan.ranges),
        "before": _describe_before(snapshot, plan.operator),
        "balance": None if plan.is_rehash else describe_balance(ranges),
        "ranges": ranges,
    }


def _describe_range(index: int, planned: RangePlan) -> Document:
    sizes = {_member(action): planned.bytes_of(action) for action in ACTIONS}
    return {
        "index": index,
        "key_groups": [planned.key_groups.start, planned.key_groups.end],
        "rows": planned.rows,
        "size_bytes": planned.size_bytes,
        "read_bytes": sum(sizes.values()) - sizes["link_bytes"],
        **sizes,
        "sources": [
            {
                "state": piece.state,
                "path": piece.path,
                "key_groups": [piece.key_groups.start, piece.key_groups.end],
                "action": _member(piece.action).removesuffix("_bytes"),
                "rows": piece.rows,
                "size_bytes": piece.size_bytes,
            }
            for piece in planned.slices
        ],
    }


def _member(action: str) -> str:
    return f"{action.replace('-', '_')}_bytes"


def _result_text(document: Document) -> Iterator[Block]:
    yield f"{document['source']} -> {document['destination']} ({document['mode']})"
    for operator in document["operators"]:
        yield from _heading(operator)
        yield Table(
            ("range", "key groups", "rows", "data"),
            [
                (str(r["index"]), span(r["key_groups"]), count(r["rows"]), size(r["size_bytes"]))
                for r in operator["ranges"]
            ],
            left=2,
        )
        yield from _balances(operator)


def _plan_text(document: Document) -> Iterator[Block]:
    target = f" -> {document['destination']}" if document["destination"] else ""
    yield f"plan: {document['source']}{target} ({document['mode']}), nothing was written"
    actions = [action for action in ACTIONS if document[_member(action)]]
    for operator in document["operators"]:
        yield from _heading(operator)
        yield Table(
            ("range", "key groups", "rows", "data", "files", "to read", *actions),
            [
                (
                    str(r["index"]),
                    span(r["key_groups"]),
                    count(r["rows"]),
                    size(r["size_bytes"]),
                    count(len({piece["path"] for piece in r["sources"]})),
                    size(r["read_bytes"]),
                    *(size(r[_member(action)]) for action in actions),
                )
                for r in operator["ranges"]
            ],
            left=2,
        )
        yield from _balances(operator)
    yield ""
    parts = [f"{action} {size(document[_member(action)])}" for action in actions]
    yield f"in all, each file once: {', '.join(parts) or 'nothing to do'}"


def _heading(operator: Document) -> Iterator[Block]:
    before = operator["before"]
    yield ""
    yield (
        f"operator {operator['uid']!r}: parallelism {before['parallelism']} -> "
        f"{operator['parallelism']}, max parallelism {before['max_parallelism']}"
        + (
            f" -> {operator['max_parallelism']}"
            if operator["max_parallelism"] != before["max_parallelism"]
            else ""
        )
    )
    yield ""


def _balances(operator: Document) -> Iterator[Block]:
    yield ""
    yield balance_table(
        "balance: the heaviest range against the mean",
        {"before": operator["before"]["balance"], "after": operator["balance"]},
    )
    if operator["balance"] is None:
        yield "after: known only once every row has its new key group"
