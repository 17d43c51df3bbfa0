"""``keygroups gc``: files that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator

import click

from keygroups.cli.output import Block, Document, Output, Table, output_option, plural, size

SECONDS_AN_HOUR = 3600


@click.command(short_help="List or delete unneeded files.")
@click.argument("snapshot", metavar="SNAPSHOT", type=click.Path())
@click.option("--delete", is_flag=True, help="Delete them; else they are only listed.")
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    default=24,
    show_default=True,
    metavar="HOURS",
    help="Leave what a writer touched since; it may be in the making. 0 only if nobody writes.",
)
@output_option
def gc(snapshot: str, *, delete: bool, older_than: float, output: Output) -> None:
    """List files that no manifest names: leftovers of writers that failed.

    A dry run until --delete is given.

    Example: keygroups gc SNAPSHOT --older-than 48 --delete
    """
    from keygroups.snapshot.gc import collect_garbage

    every = collect_garbage(snapshot, older_than_s=0, delete=False)
    garbage = collect_garbage(snapshot, older_than_s=older_than * SECONDS_AN_HOUR, delete=delete)
    document = {
        "snapshot": snapshot,
        "deleted": delete,
        "older_than_hours": older_than,
        "files": [{"path": path, "size_bytes": size_bytes} for path, size_bytes in garbage],
        "size_bytes": sum(size_bytes for _, size_bytes in garbage),
        "younger_files": max(0, len(every) - len(garbage)),
    }
    output.show(document, _text)


def _text(document: Document) -> Iterator[Block]:
    files = document["files"]
    if files:
        yield Table(("file", "size"), [(f["path"], size(f["size_bytes"])) for f in files])
        yield ""
    total = f"{plural(len(files), 'file')}, {size(document['size_bytes'])}"
    if document["deleted"]:
        yield f"deleted {total}"
    else:
        yield f"to delete: {total}" + ("; a dry run, add --delete" if files else "")
    if document["younger_files"]:
        yield (
            f"left: {plural(document['younger_files'], 'file')} younger than "
            f"{document['older_than_hours']:g} hours"
        )
