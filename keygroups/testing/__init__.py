"""What tests of backends, formats and engines share: an oracle, strategies, faults, a suite.

- :mod:`~keygroups.testing.model`: a snapshot as a plain dictionary; the oracle.
- :mod:`~keygroups.testing.strategies`: hypothesis strategies for tables of any type.
- :mod:`~keygroups.testing.conformance`: :class:`BackendConformance`, which every backend passes.
- :mod:`~keygroups.testing.faults`: every step of storage counted, failed or killed.

Public: anybody who writes a backend subclasses :class:`BackendConformance`. Needs ``pytest`` and
``hypothesis``; nothing in the library imports it.
"""

from keygroups.testing.conformance import BackendConformance
from keygroups.testing.faults import Steps, fail_at, observed
from keygroups.testing.model import Model, array_of, plain, rows_of, table_of
from keygroups.testing.raw import rocksdb_entries
from keygroups.testing.scratch import scratch_folder, segment_size
from keygroups.testing.snapshots import tiles, write_as_several
from keygroups.testing.strategies import KeyedTable, key_types, tables, value_types, values

__all__ = [
    "BackendConformance",
    "KeyedTable",
    "Model",
    "Steps",
    "array_of",
    "fail_at",
    "key_types",
    "observed",
    "plain",
    "rocksdb_entries",
    "rows_of",
    "scratch_folder",
    "segment_size",
    "table_of",
    "tables",
    "tiles",
    "value_types",
    "values",
    "write_as_several",
]
