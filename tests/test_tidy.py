"""Limits on the text of the code, for every file that is shipped."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 70

SOURCES = sorted([*ROOT.glob("keygroups/**/*.py"), *ROOT.glob("backends/**/*.py")])


def source_id(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_no_line_is_wider_than_100_columns(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    wide = {n: len(line) for n, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS}
    assert wide == {}, f"{source_id(path)}: columns by line"


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_no_function_is_longer_than_70_lines(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lengths = {
        f"{node.name} (line {node.lineno})": node.end_lineno - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert long == {}, f"{source_id(path)}: lines by function"
