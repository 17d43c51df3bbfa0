"""The public conformance suite, run by our own backends; their files read by other readers."""

import pyarrow as pa
import pyarrow.parquet as pq

from keygroups.keys import decode_keys
from keygroups.snapshot.rows import decode_rows
from keygroups.testing import BackendConformance, rocksdb_entries


class TestParquet(BackendConformance):
    backend = "parquet"

    def raw_rows(self, path, schema):
        rows = pq.ParquetFile(path, page_checksum_verification=True).read()
        # Parquet has no seconds: the file holds milliseconds, and says so.
        fields = zip(rows.columns, schema.stored, strict=True)
        return pa.table([c.cast(field.type) for c, field in fields], names=rows.column_names)


class TestRocksDb(BackendConformance):
    backend = "rocksdb"

    def raw_rows(self, path, schema):
        keys, values = zip(*rocksdb_entries(path), strict=True)
        assert list(keys) == sorted(keys)
        columns = schema.key_columns(
            decode_keys(pa.array([key[6:] for key in keys]), [schema.key_type])[0]
        )
        types = [field.type for field in schema.value]
        columns += decode_rows(pa.array(values, pa.large_binary()), types)
        groups = [int.from_bytes(key[:2], "big") for key in keys]
        hashes = [int.from_bytes(key[2:6], "big") - (1 << 31) for key in keys]
        stored = [pa.array(groups, pa.uint16()), pa.array(hashes, pa.int32()), *columns]
        return pa.table(stored, names=schema.stored.names)


class TestMemory(BackendConformance):
    backend = "memory"

    def raw_rows(self, path, schema):  # noqa: ARG002 - the file knows it
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_file(file).read_all()
