"""What is shipped: the wheel, how it imports, and what `import keygroups` promises.

The wheel is built once and tried in an environment that has the dependencies of this one but
not this checkout, so a test cannot pass by finding the sources.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import keygroups

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]

PUBLIC_NAMES = {
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
}
# A worker of Spark pays for every import, and the extras may be absent.
KEPT_OUT = {"click", "duckdb", "pandas", "pyspark", "rich", "rocksdict"}


def run(command, cwd, **environment):
    # Neither the repository nor what the user has on PYTHONPATH may leak into the child.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def output_of(command, cwd, **environment):
    done = run(command, cwd, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    return Path(output_of([ROOT / "tools" / "wheel", out], cwd=ROOT))


def bare_environment(directory):
    """A virtual environment with this one's dependencies on its path, but not this project.

    The path comes from a .pth file. Python does not process the .pth files of a directory that
    is added like that, so the editable install of this project stays out.
    """
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    site = Path(output_of([python, "-c", "import site; print(site.getsitepackages()[0])"], "/"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    return bare_environment(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="session")
def wheel_python(tmp_path_factory, wheel):
    python = bare_environment(tmp_path_factory.mktemp("installed") / "venv")
    if shutil.which("uv"):
        installer = ["uv", "pip", "install", "--python", python, "--offline"]
    else:
        installer = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index"]
    output_of([*installer, "--no-deps", wheel], cwd="/")
    return python


# --- the wheel -----------------------------------------------------------------------------


def test_wheel_holds_exactly_the_modules_of_both_directories(wheel):
    expected = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("keygroups/**/*.py")}
    expected |= {f"keygroups/{p.relative_to(ROOT).as_posix()}" for p in ROOT.glob("backends/*.py")}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.endswith(".py")}
    assert shipped == expected


def test_wheel_holds_marker_format_and_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"keygroups/py.typed", "keygroups/snapshot/FORMAT.md"} <= names
    assert f"keygroups-{VERSION}.dist-info/licenses/LICENSE" in names


def test_wheel_declares_command_and_backends(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"keygroups-{VERSION}.dist-info/entry_points.txt").decode()
    assert "keygroups = keygroups.cli:main" in text
    assert "[keygroups.backends]" in text
    for name, value in PROJECT["project"]["entry-points"]["keygroups.backends"].items():
        assert f"{name} = {value}" in text


def test_listed_packages_are_the_directories():
    directories = [ROOT / "keygroups", *(ROOT / "keygroups").glob("**/")]
    packages = {".".join(d.relative_to(ROOT).parts) for d in directories if any(d.glob("*.py"))}
    assert PROJECT["tool"]["setuptools"]["packages"] == sorted(packages | {"keygroups.backends"})


def test_every_package_has_an_init():
    # Without one it would be a namespace package, which the editable install does not find.
    directories = {path.parent for path in ROOT.glob("keygroups/**/*.py")} | {ROOT / "backends"}
    assert [d for d in sorted(directories) if not (d / "__init__.py").exists()] == []


# --- installed -----------------------------------------------------------------------------


def test_installed_wheel_imports_with_every_backend(wheel_python, tmp_path):
    code = """
import importlib.metadata, keygroups, keygroups.backends.parquet
for point in importlib.metadata.entry_points(group="keygroups.backends"):
    print(point.name, point.load().__module__)
assert "dist-packages" in keygroups.__file__ or "site-packages" in keygroups.__file__
"""
    lines = output_of([wheel_python, "-c", code], tmp_path).splitlines()
    assert sorted(lines) == [
        "memory keygroups.backends.memory",
        "parquet keygroups.backends.parquet",
        "rocksdb keygroups.backends.rocksdb",
    ]


@pytest.mark.parametrize("environment", ["this", "wheel"])
def test_backends_is_no_name_of_its_own(environment, wheel_python, tmp_path):
    # Under two names a module would be loaded twice, with two classes for each error.
    python = sys.executable if environment == "this" else wheel_python
    output_of([python, "-c", "import keygroups.backends"], tmp_path)
    done = run([python, "-c", "import backends"], tmp_path)
    assert done.returncode != 0
    assert "No module named 'backends'" in done.stderr


@pytest.mark.parametrize("module", ["keygroups", "keygroups.backends.parquet"])
def test_import_keeps_the_heavy_packages_out(module, wheel_python, tmp_path):
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = set(output_of([wheel_python, "-c", code], tmp_path).split())
    assert module.partition(".")[0] in loaded
    assert loaded & KEPT_OUT == set()


def test_commands_print_the_version(wheel_python, tmp_path):
    by_name = output_of([wheel_python.parent / "keygroups", "--version"], tmp_path)
    by_module = output_of([wheel_python, "-m", "keygroups", "--version"], tmp_path)
    assert VERSION in by_name
    assert VERSION in by_module


def test_command_prints_its_verbs(wheel_python, tmp_path):
    text = output_of([wheel_python.parent / "keygroups", "--help"], tmp_path)
    for verb in ("rescale", "inspect", "verify", "diff", "plan"):
        assert verb in text


def test_command_without_its_extra_says_what_to_install(wheel_python, tmp_path):
    code = "import sys; sys.modules['click'] = None; from keygroups.cli import main; main()"
    done = run([wheel_python, "-c", code], tmp_path)
    assert done.returncode == 2
    assert "keygroups[cli]" in done.stderr
    assert "Traceback" not in done.stderr


def test_wheel_as_a_zip_works_on_executors(wheel, bare_python, tmp_path):
    # --py-files and addArtifacts take a .zip, not a .whl. The wheel is one already; its dist-info
    # stands at the root of the zip, which is what makes the entry points visible there.
    archive = shutil.copy(wheel, tmp_path / "keygroups.zip")
    code = """
import importlib.metadata, keygroups, keygroups.backends
print(keygroups.__file__)
print(keygroups.backends.__file__)
print(importlib.metadata.distribution("keygroups").locate_file(""))
for point in importlib.metadata.entry_points(group="keygroups.backends"):
    print(point.load().__name__)
"""
    lines = output_of([bare_python, "-c", code], "/", PYTHONPATH=str(archive)).splitlines()
    assert all(line.startswith(str(archive)) for line in lines[:3]), lines
    assert sorted(lines[3:]) == ["MemoryBackend", "ParquetBackend", "RocksDbBackend"]


# --- the front -----------------------------------------------------------------------------


def test_all_is_sorted_and_is_what_is_documented():
    names = [name for name in keygroups.__all__ if not name.startswith("__")]
    assert names == sorted(names)
    assert set(names) == PUBLIC_NAMES
    assert [name for name in keygroups.__all__ if not hasattr(keygroups, name)] == []


def test_public_names_are_not_hidden_by_modules_of_the_same_name(wheel_python, tmp_path):
    # `keygroups.rescale` is a module as well; importing it must not put it before the function.
    code = """
import importlib, keygroups
for module in ("rescale", "snapshot", "snapshot.diff", "snapshot.verify"):
    try:
        importlib.import_module(f"keygroups.{module}")
    except ModuleNotFoundError:
        pass
print(*[name for name in keygroups.__all__ if type(getattr(keygroups, name)).__name__ == "module"])
"""
    assert output_of([wheel_python, "-c", code], tmp_path) == ""


def test_readme_uses_only_public_names():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"\bkg\.([A-Za-z_]\w*)", readme))
    assert used != set()
    assert used - set(keygroups.__all__) == set()


def test_version_is_told_once():
    assert importlib.metadata.version("keygroups") == VERSION
    assert getattr(keygroups, "__version__", VERSION) == VERSION
