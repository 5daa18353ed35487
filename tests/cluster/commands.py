"""The commands of `smqrt cluster`, in this process: a new one would import for longer than they take."""

from __future__ import annotations

from subprocess import CompletedProcess

from click.testing import CliRunner

from smqrt.cli import cli
from tests.conftest import Served

SOON = {"reconnect_delay": 0.1, "reconnect_delay_max": 0.5}


def smqrt_cluster(served: Served, command: str, *words: str) -> CompletedProcess[str]:
    line = ["cluster", command, "--url", served.admin_url, *words]
    ran = CliRunner().invoke(cli, line)
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return CompletedProcess(line, ran.exit_code, ran.stdout, ran.stderr)


def status(served: Served, *words: str) -> CompletedProcess[str]:
    return smqrt_cluster(served, "status", *words)
