"""RocksDB table files (SST) from Arrow columns and back, without RocksDB.

:func:`write_sst` makes files that RocksDB's own ``ingest_external_file`` accepts;
:func:`read_sst` and :class:`SstReader` read them, and those of RocksDB's ``SstFileWriter``,
many entries per NumPy call. Neither loads RocksDB.
"""

from __future__ import annotations

from keygroups.backends.sst_reader import RandomAccess, SstReader, read_sst
from keygroups.backends.sst_table import ByteSink
from keygroups.backends.sst_writer import DEFAULT_BLOCK_SIZE_BYTES, write_sst

__all__ = [
    "DEFAULT_BLOCK_SIZE_BYTES",
    "ByteSink",
    "RandomAccess",
    "SstReader",
    "read_sst",
    "write_sst",
]
