"""`smqrt check`: calls of a Lua application that smqrt does not support."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from smqrt.apps.lua.check import (
    ABSENT,
    SKIPPED,
    SYNTAX,
    UNKNOWN,
    Finding,
    Report,
    check_application,
    read_table,
)
from smqrt.printable import json_line, printable


@click.command()
@click.argument("path", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def check(path: Path, as_json: bool) -> None:
    """List calls of a Lua application that smqrt does not support.

    FOLDER is the folder or the ZIP file of an application for the Barracuda App Server. The command reads its Lua files
    and pages, but does not run them. "absent" marks documented functions that smqrt lacks; "unknown" marks names that
    neither smqrt nor the documentation of the Barracuda App Server has. Exit code 1 when a call is absent, or a file
    has a syntax error or can't be read.
    """
    report = check_application(path, read_table())
    for finding in report.findings:
        if as_json:
            values = {"file": finding.path, "line": finding.line, "finding": finding.kind, "call": finding.name}
            click.echo(json_line(values | {"tested": finding.is_tested, "note": finding.note}))
        else:
            line = f":{finding.line}" if finding.line else ""
            click.echo(printable(f"{path / finding.path}{line}: {finding_text(finding)}"))
    if not as_json:
        click.echo(summary(report))
    sys.exit(1 if report.count(ABSENT) or report.count(SYNTAX) or report.count(SKIPPED) else 0)


def finding_text(finding: Finding) -> str:
    """Return a finding as text."""
    if finding.kind == SYNTAX:
        return f"syntax error: {finding.note}"
    if finding.kind == SKIPPED:
        return f"not read: {finding.note}"
    text = f"{finding.name} is {finding.kind}"
    if finding.is_tested:
        text += ", but the file tests for it"
    return f"{text} ({finding.note})" if finding.note else text


def summary(report: Report) -> str:
    """Return the last line of the output."""
    files = "1 file" if report.files == 1 else f"{report.files} files"
    words = {ABSENT: "absent", UNKNOWN: "unknown", SYNTAX: "with syntax errors", SKIPPED: "not read"}
    counts = [f"{report.count(kind)} {word}" for kind, word in words.items() if report.count(kind)]
    return f"{files} read: {', '.join(counts) or 'all calls are supported'}"
