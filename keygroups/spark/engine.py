"""Rescaling on Spark: one task for each new range, the commit stays with the caller.

A task gets the arguments, not the plan: it opens the snapshot and makes the same plan again,
because a plan is a pure function of both. What it wrote comes back as rows of plain data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyspark.sql import SparkSession

from keygroups.errors import IncompatibleSnapshot
from keygroups.rescale.execute import ProducedRun, RescaleArguments, execute_range
from keygroups.rescale.plan import RescalePlan
from keygroups.snapshot.commit import Attempt
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.storage import LocalStorage
from keygroups.spark.failures import our_errors
from keygroups.spark.runs import announce, delete_unnamed, keep, unpacked

_PRODUCED = pa.schema(
    [
        ("operator_number", pa.int32()),
        ("state", pa.string()),
        ("run", pa.string()),
        ("index", pa.binary()),
    ]
)
_PRODUCED_DDL = "operator_number int, state string, run string, index binary"


@dataclass(frozen=True)
class RescaleJob:
    """All that a task must know, as plain data.

    Attributes:
        source: The path of the snapshot.
        snapshot_id: Which snapshot that must be.
        target: The path of the new one.
        attempt_id: The attempt that its files belong to.
        arguments: Those of the rescale.
    """

    source: str
    snapshot_id: str
    target: str
    attempt_id: str
    arguments: RescaleArguments


def run_on_spark(
    session: SparkSession,
    attempt: Attempt,
    snapshot: Snapshot,
    arguments: RescaleArguments,
    plan: RescalePlan,
) -> list[ProducedRun]:
    """Writes every new range in a task of its own and returns what they wrote.

    Args:
        session: Classic or Connect; its executors must see both paths.
        attempt: The attempt, which the caller commits.
        snapshot: The source.
        arguments: What the plan was made of.
        plan: The plan.

    Raises:
        KeyGroupsError: As :func:`keygroups.rescale`.
    """
    units = [
        (unit, operator_number, range_number)
        for unit, (operator_number, range_number) in enumerate(
            (operator_number, range_number)
            for operator_number, operator_plan in enumerate(plan.operators)
            for range_number in range(len(operator_plan.ranges))
        )
    ]
    job = RescaleJob(
        source=str(snapshot.storage.root),
        snapshot_id=snapshot.manifest.snapshot_id,
        target=str(attempt.storage.root),
        attempt_id=attempt.attempt_id,
        arguments=arguments,
    )
    announce(attempt)
    with our_errors():
        rows = (
            session.createDataFrame(units, "unit int, operator_number int, range_number int")
            .repartitionById(len(units), "unit")
            .mapInArrow(partial(execute_units, job), _PRODUCED_DDL)
            .toArrow()
            .to_pylist()
        )
    produced = [
        ProducedRun(
            row["operator_number"],
            row["state"],
            unpacked(
                (row["run"], row["index"]),
                plan.operators[row["operator_number"]].max_parallelism,
            ),
        )
        for row in rows
    ]
    delete_unnamed(attempt, [p.written for p in produced])
    return produced


def execute_units(job: RescaleJob, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Writes the ranges that the rows of one task name; on an executor."""
    attempt = Attempt(LocalStorage(job.target), job.attempt_id)
    opened: tuple[Snapshot, RescalePlan] | None = None
    for batch in batches:
        for unit in batch.to_pylist():
            snapshot, plan = opened = opened or _open(job)
            produced = execute_range(
                attempt, snapshot, plan, unit["operator_number"], unit["range_number"]
            )
            parts = keep(attempt, [p.written for p in produced])
            rows = [
                (p.operator_number, p.state, *part) for p, part in zip(produced, parts, strict=True)
            ]
            yield pa.record_batch(
                [[row[i] for row in rows] for i in range(len(_PRODUCED))], schema=_PRODUCED
            )


def _open(job: RescaleJob) -> tuple[Snapshot, RescalePlan]:
    snapshot = Snapshot.open(job.source)
    if snapshot.manifest.snapshot_id != job.snapshot_id:
        raise IncompatibleSnapshot(
            f"the snapshot at {job.source} was replaced while it was rescaled; rescale it again"
        )
    return snapshot, job.arguments.plan(snapshot)
