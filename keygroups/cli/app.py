"""The command group, and what becomes of an error: one line on stderr and an exit code.

==== ====================================================================================
code meaning
==== ====================================================================================
0    done
1    findings: ``verify`` found damage, ``diff`` found a difference
2    wrong arguments: also a path with no snapshot, or a target that has one already
3    the snapshot is corrupted or incompatible
4    the storage failed: permissions, space, a device; also when writing the output
70   a bug in keygroups; ``KEYGROUPS_DEBUG=1`` shows the traceback
130  interrupted (Ctrl-C); nothing half-written is visible
141  whoever read the output went away, as in ``| head``
==== ====================================================================================

stdout has the data and nothing else, in UTF-8; stderr has errors, progress and hints.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import click

from keygroups.cli.cat import cat
from keygroups.cli.gc import gc
from keygroups.cli.hash import hash_command
from keygroups.cli.inspect import inspect
from keygroups.cli.output import printable
from keygroups.cli.rescale import plan, rescale
from keygroups.cli.verify_diff import diff, verify
from keygroups.errors import (
    IncompatibleSnapshot,
    InvalidArgument,
    SnapshotCorrupted,
    SnapshotExists,
    SnapshotNotFound,
)

WRONG_ARGUMENTS = 2
BAD_SNAPSHOT = 3
STORAGE_FAILED = 4
BUG = 70
INTERRUPTED = 130
PIPE_CLOSED = 141


class _PipeClosed(Exception):
    """Whoever read stdout went away. Click would make of it exit code 1: findings."""


class CommandLine(click.Group):
    """A group whose errors are one line each and whose exit codes are those above."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **extra: Any,
    ) -> NoReturn:
        """Runs a command and exits the process."""
        extra["standalone_mode"] = False
        run = super().main
        sys.exit(_exit_code(lambda: run(args, prog_name or "keygroups", **extra)))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that was found."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _PipeClosed from error


@click.group(
    "keygroups",
    cls=CommandLine,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 findings (verify, diff), 2 wrong arguments, 3 corrupted or "
    "incompatible snapshot, 4 storage failed.",
)
@click.version_option(version("keygroups"), message="%(prog)s %(version)s")
@click.pass_context
def app(context: click.Context) -> int | None:
    """Look into, check and rescale snapshots of key-group partitioned state.

    Every command takes --output json for machines.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        return WRONG_ARGUMENTS
    return None


for _command in (rescale, plan, inspect, verify, diff, cat, hash_command, gc):
    app.add_command(_command)


def _exit_code(run: Callable[[], int | None]) -> int:
    """Runs a command; says what went wrong in one line."""
    _write_utf8()
    try:
        code = run()
        sys.stdout.flush()
    except click.UsageError as error:
        return _complain(_usage_text(error), WRONG_ARGUMENTS)
    except click.ClickException as error:
        return _complain(error.format_message(), WRONG_ARGUMENTS)
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", INTERRUPTED)
    except (InvalidArgument, SnapshotNotFound, SnapshotExists) as error:
        return _complain(str(error), WRONG_ARGUMENTS)
    except (SnapshotCorrupted, IncompatibleSnapshot) as error:
        return _complain(str(error), BAD_SNAPSHOT)
    except (_PipeClosed, BrokenPipeError):
        _abandon_stdout()
        return PIPE_CLOSED
    except OSError as error:  # among them StorageUnavailable
        _abandon_stdout()
        return _complain(str(error), STORAGE_FAILED)
    except Exception as error:  # noqa: BLE001 -- the last resort of a program
        return _complain(
            f"{type(error).__name__}: {error}; this is a bug in keygroups: please report it with "
            f"the output of the same command under KEYGROUPS_DEBUG=1",
            BUG,
        )
    return code or 0


def _complain(message: str, code: int) -> int:
    if os.environ.get("KEYGROUPS_DEBUG") == "1":
        traceback.print_exc()
    line = " ".join(part.strip() for part in message.splitlines())
    click.echo(f"error: {printable(line)}", err=True)
    return code


def _usage_text(error: click.UsageError) -> str:
    """What is wrong, and where to look, in one line."""
    text = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and re.match(r"-\d", error.option_name):
        text += "; put -- before keys that begin with a dash"
    path = error.ctx.command_path if error.ctx else "keygroups"
    return f"{text}; see `{path} --help`"


def _write_utf8() -> None:
    """Makes stdout UTF-8 wherever it goes; what has no UTF-8, a lone surrogate, is escaped.

    In JSON that escape is exactly the one that JSON has for it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def _abandon_stdout() -> None:
    """Points stdout nowhere, so that the interpreter does not fail again when it flushes."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # it is no real file
        sys.stdout = io.StringIO()
