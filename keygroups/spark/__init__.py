"""Key groups on Spark DataFrames: the data source ``keygroups`` and the columns behind it.

Everything here uses the public DataFrame API only, so it runs on classic sessions and on Spark
Connect. ``keygroups`` must be importable on the executors: installed there, or shipped as a
zip (a wheel renamed to ``.zip``) with ``--py-files`` or ``spark.addArtifact(…, pyfile=True)``.
"""

from keygroups.spark.datasource import register
from keygroups.spark.functions import key_group, subtask
from keygroups.spark.write import write_snapshot

__all__ = [
    "key_group",
    "register",
    "subtask",
    "write_snapshot",
]
