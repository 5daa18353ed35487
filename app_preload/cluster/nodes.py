"""Servers in processes of their own."""

import os
import re
import sys
import tempfile
from pathlib import Path

import gevent
from gevent import subprocess

AGAIN_S = 5.0  # until one that died is started again: time to see what the other one does without it
LISTENS = re.compile(r"listening on http://[0-9.]+:([0-9]+)")


class Nodes:
    """The servers, and where they listen.

    Each leaves its port in a folder, where the Unix sockets of their links are as well.

    Args:
        app: folder of the application that they run.
        shared: where that folder is, for all workers of a server; None for a server that is one process.
        numbers: of the nodes that this process starts.
    """

    def __init__(self, app, shared, numbers):
        self._app = app
        self._temporary = None if shared else tempfile.TemporaryDirectory(prefix="smqrt-nodes-")
        self._directory = (shared or Path(self._temporary.name)) / "nodes"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._runs = [gevent.spawn(self._keep, number) for number in numbers]

    def port(self, number):
        """The port of a node; None when it isn't there."""
        try:
            return int((self._directory / number).read_text())
        except OSError:
            return None

    def close(self):
        """End the nodes that this process has started."""
        gevent.killall(self._runs)
        if self._temporary:
            self._temporary.cleanup()

    def _keep(self, number):
        while True:
            self._run(number)
            gevent.sleep(AGAIN_S)

    def _run(self, number):
        links = ["--cluster-directory", self._directory, "--cluster-node", number]
        command = [sys.executable, "-m", "smqrt", "serve", self._app, "--port", "0", *links]
        environment = {name: value for name, value in os.environ.items() if "SMQRT_" not in name}  # our own settings
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=self._app, env=environment, **pipes)
        port = self._directory / number
        try:
            for line in process.stdout:  # until it has ended
                if found := LISTENS.search(line):
                    port.write_text(found[1])
        finally:
            port.unlink(missing_ok=True)
            process.kill()
            process.wait()
