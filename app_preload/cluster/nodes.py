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
        for number in numbers:  # of a process that was killed
            (self._directory / number).unlink(missing_ok=True)
        self._runs = [gevent.spawn(self._keep, number) for number in numbers]

    def port(self, number):
        """The port of a node; None when it isn't there."""
        try:
            return int((self._directory / number).read_text())
        except OSError:
            return None

    def _tell_port(self, number, port):
        beside = self._directory / f"{number}.{os.getpid()}"
        beside.write_text(port)
        beside.rename(self._directory / number)  # whole, or not at all

    def _forget_port(self, number, port):
        if str(self.port(number)) == port:  # and not that of the process that takes this one's place
            (self._directory / number).unlink(missing_ok=True)

    def close(self):
        """End the nodes that this process has started."""
        gevent.killall(self._runs)
        if self._temporary:
            self._temporary.cleanup()

    def _keep(self, number):
        while True:
            try:
                self._run(number)
            except OSError as error:
                print(f"node {number}: {error}")
            gevent.sleep(AGAIN_S)

    def _run(self, number):
        links = ["--cluster-directory", self._directory, "--cluster-node", number]
        command = [sys.executable, "-m", "smqrt", "serve", self._app, "--port", "0", *links]
        environment = {name: value for name, value in os.environ.items() if "SMQRT_" not in name}  # our own settings
        environment["SMQRT_ADMIN__ENABLED"] = "false"  # commands such as `smqrt top` find the server that started us
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        port = ""
        with subprocess.Popen(command, cwd=self._app, env=environment, **pipes) as process:
            try:
                for line in process.stdout:  # until it has ended
                    if found := LISTENS.search(line):
                        port = found[1]
                        self._tell_port(number, port)
            finally:
                self._forget_port(number, port)
                process.kill()
