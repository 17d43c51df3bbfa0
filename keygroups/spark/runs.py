"""Runs on their way from a task to the driver, and what the driver does with them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace

from keygroups.errors import StorageUnavailable
from keygroups.snapshot.commit import Attempt
from keygroups.snapshot.index import read_index, write_index
from keygroups.snapshot.manifest import (
    Manifest,
    Operator,
    StoredFile,
    run_from_json,
    run_to_json,
)
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.writer import WrittenRun


def packed(written: WrittenRun) -> tuple[str, bytes]:
    """Returns a run as text and bytes: JSON as in a manifest, and an index file of its own."""
    index_rows = sum(len(segment.key_group) for segment in written.index)
    text = json.dumps({"run": run_to_json(written.run), "index_rows": index_rows})
    return text, write_index([written.index])


def unpacked(parts: tuple[str, bytes], max_parallelism: int) -> WrittenRun:
    """Returns the run that :func:`packed` packed."""
    text, index = parts
    fields = json.loads(text)
    run = run_from_json(fields["run"], max_parallelism)
    return WrittenRun(run, read_index(index, [run], fields["index_rows"])[0])


def check_unique_keys(
    storage: LocalStorage, operator: Operator, written: Sequence[WrittenRun]
) -> None:
    """Checks that no key is in two runs, before they are committed as an operator's only state.

    A run has each key once, so only runs that overlap are read, and of them only the keys, a
    window of key groups at a time.

    Raises:
        InvalidArgument: If a key is there twice; the message names it.
    """
    runs = tuple(w.run for w in written)
    state = replace(operator.states[0], runs=runs)
    operator = replace(operator, states=(state,))
    manifest = Manifest("", "", (operator,), StoredFile("", 0, ""), 0)
    snapshot = Snapshot(storage, manifest, [w.index for w in written])
    snapshot.check_unique_keys(operator, state)


def announce(attempt: Attempt) -> None:
    """Tells the tasks of an attempt that it goes on; :func:`keep` looks."""
    with attempt.storage.create(attempt.marker_path) as file:
        file.close_durably()


def keep(attempt: Attempt, written: Sequence[WrittenRun]) -> list[tuple[str, bytes]]:
    """Ends a task: returns its runs packed, durable for a commit in another process.

    Raises:
        StorageUnavailable: If the attempt was committed or aborted meanwhile, as happens to a
            task that Spark gave up; then its files are deleted.
    """
    attempt.storage.sync_folders()
    if not attempt.storage.exists(attempt.marker_path):
        for path in (segment.file.path for w in written for segment in w.run.segments):
            attempt.storage.delete_tree(path)
        raise StorageUnavailable(
            f"attempt {attempt.attempt_id} at {attempt.storage.root} is over: another try of "
            f"this task was committed, or the job failed for a reason told elsewhere"
        )
    return [packed(run) for run in written]


def delete_unnamed(attempt: Attempt, written: Sequence[WrittenRun]) -> None:
    """Deletes the files of an attempt that no run names: the marker, and of tasks run again."""
    named = {segment.file.path for w in written for segment in w.run.segments}
    with contextlib.suppress(StorageUnavailable):  # no harm: nothing will name them
        for path, _, _ in list(attempt.storage.list_files()):
            if path.startswith(f"{attempt.folder}/") and path not in named:
                attempt.storage.delete_tree(path)
