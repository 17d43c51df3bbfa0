"""The command line. Only this package knows click and rich (extra ``cli``).

General layout: :mod:`~keygroups.cli.app` is the command group and the table of exit codes;
each command is a module that asks the core, makes one JSON-able document of the answer, and
one generator that turns the document into text; :mod:`~keygroups.cli.output` shows either.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line and exits: what the installed ``keygroups`` calls."""
    try:
        import click
        import rich
    except ImportError as error:
        sys.stderr.write(
            f"error: the command line needs click and rich ({error.name} is missing); "
            f"pip install 'keygroups[cli]'\n"
        )
        sys.exit(2)
    del click, rich
    from keygroups.cli.app import app

    app.main()
