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

__all__ = [
    "AsyncFunctionError",
    "IncompatibleSnapshot",
    "InvalidArgument",
    "KeyGroupRange",
    "KeyGroupsError",
    "SnapshotCorrupted",
    "SnapshotExists",
    "SnapshotNotFound",
    "StorageUnavailable",
    "assign_key_groups",
    "assign_to_key_group",
    "balanced_cut",
    "default_max_parallelism",
    "hash_keys",
    "key_group_range_for_subtask",
    "subtask_for_key_group",
]
