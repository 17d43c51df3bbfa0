"""What every test may use: one local Spark for the session, and the hypothesis profiles."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# No deadline anywhere: the first example pays for imports, and durations are never asserted.
# CI says the same of the same commit; dev and nightly draw new examples at every run, and the
# blob that is printed reproduces a failure.
settings.register_profile("dev", max_examples=30, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(items):
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """A Spark session on two local cores, started by the first test that asks for it."""
    from pyspark import cloudpickle
    from pyspark.sql import SparkSession

    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        # Executors must run in this environment, where keygroups is installed, and nothing may
        # depend on how the machine resolves its own name.
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        session = (
            SparkSession.builder.master("local[2]")
            .appName("keygroups-tests")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.memory", "2g")
            .config("spark.local.dir", str(scratch / "local"))
            .config("spark.log.level", "ERROR")
            .config("spark.sql.execution.arrow.pyspark.enabled", "true")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.shuffle.partitions", "4")
            .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        # With importmode=importlib the test modules cannot be imported by the workers, so the
        # functions in them travel by value. All of them are loaded by the time of the first test.
        for module in list(sys.modules.values()):
            if TESTS in Path(getattr(module, "__file__", None) or "/").parents:
                cloudpickle.register_pickle_by_value(module)
        yield session
        session.stop()
