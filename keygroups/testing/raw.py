"""Files of segments as strangers read them."""

from __future__ import annotations

import tempfile
from pathlib import Path


def rocksdb_entries(path: Path) -> list[tuple[bytes, bytes]]:
    """Returns what RocksDB itself finds in an SST file: keys and values, in its order.

    Needs ``rocksdict``. The file is ingested into a new database, as a copy.
    """
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        db = rocksdict.Rdict(folder, options)
        try:
            db.ingest_external_file([str(path)])
            entries, it = [], db.iter()
            it.seek_to_first()
            while it.valid():
                entries.append((it.key(), it.value()))
                it.next()
            it.status()  # an iterator that meets damage just ends
            del it
        finally:
            db.close()
    return entries
