"""Key groups for Python and Spark: keyed state that rescales.

General layout: :mod:`~keygroups.assignment` and :mod:`~keygroups.hashing` say which key
belongs to which key group and subtask; :mod:`~keygroups.snapshot` writes and reads state in
that order; :mod:`~keygroups.rescale` cuts it anew. :mod:`keygroups.spark` and
:mod:`keygroups.cli` are the two ways in besides this module; they are imported on demand.
"""

from keygroups.assignment import (
    KeyGroupRange,
    balanced_cut,
    default_max_parallelism,
    key_group_range_for_subtask,
    subtask_for_key_group,
)
from keygroups.errors import (
    AsyncFunctionError,
    IncompatibleSnapshot,
    InvalidArgument,
    KeyGroupsError,
    SnapshotCorrupted,
    SnapshotExists,
    SnapshotNotFound,
    StorageUnavailable,
)
from keygroups.hashing import assign_key_groups, assign_to_key_group, hash_keys
from keygroups.rescale import plan_rescale, rescale
from keygroups.snapshot.diff import diff
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.verify import verify
from keygroups.snapshot.writer import write_snapshot

__all__ = [
    "AsyncFunctionError",
    "IncompatibleSnapshot",
    "InvalidArgument",
    "KeyGroupRange",
    "KeyGroupsError",
    "Snapshot",
    "SnapshotCorrupted",
    "SnapshotExists",
    "SnapshotNotFound",
    "StorageUnavailable",
    "assign_key_groups",
    "assign_to_key_group",
    "balanced_cut",
    "default_max_parallelism",
    "diff",
    "hash_keys",
    "key_group_range_for_subtask",
    "plan_rescale",
    "rescale",
    "subtask_for_key_group",
    "verify",
    "write_snapshot",
]
