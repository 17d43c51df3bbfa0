"""The README's examples run, in order, as a reader would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(
    r"^(<!-- needs: spark -->\n)?```(python|console)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL
)
VALUE = re.compile(r"^(kg\.\S.*?)\s{2,}# (\d+|True|KeyGroupRange\[.*?\])", re.MULTILINE)


def test_examples_run(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"spark": spark}
    commands = 0
    for _, language, code in BLOCKS:
        if language == "python":
            # The session began in another directory, where its JVM would look for a relative path.
            code = code.replace('"from-spark"', repr(str(tmp_path / "from-spark")))
            exec(compile(code, "README.md", "exec"), names)
            for expression, value in VALUE.findall(code):
                assert repr(eval(expression, names)) == value
            continue
        for line in re.findall(r"^\$ (keygroups .*)$", code, re.MULTILINE):
            words = shlex.split(line, comments=True)
            subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
            commands += 1
    assert commands >= 8
    assert (tmp_path / "by-spark" / "manifest.json").exists()
