"""Server processes of the nodes."""

import os
import re
import sys
import tempfile
from pathlib import Path

import gevent
from gevent import subprocess

RESTART_DELAY_S = 5.0  # long enough to watch the other node alone
LISTENS = re.compile(r"listening on http://[0-9.]+:([0-9]+)")


class Nodes:
    """The servers and their ports.

    Each port is stored in a file, in a folder that also contains the Unix sockets of the links.

    Args:
        app: folder of the application that the nodes run.
        shared: folder that the workers of a server share, in which the folder of the ports is created; None without
            workers.
        numbers: numbers of the nodes that this process starts.
    """

    def __init__(self, app, shared, numbers):
        self._app = app
        self._temporary = None
        if shared is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="smqrt-nodes-")
            shared = Path(self._temporary.name)
        self._directory = shared / "nodes"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for number in numbers:  # left over from a killed process
            (self._directory / number).unlink(missing_ok=True)
        self._greenlets = [gevent.spawn(self._keep_running, number) for number in numbers]

    def port(self, number):
        """Return the port of a node; None when it is not running."""
        try:
            return int((self._directory / number).read_text())
        except OSError:
            return None

    def _write_port(self, number, port):
        temporary = self._directory / f"{number}.{os.getpid()}"
        temporary.write_text(port)
        temporary.rename(self._directory / number)  # atomic: no process reads an incomplete number

    def _remove_port(self, number, port):
        if str(self.port(number)) == port:  # else it is the port of the process that replaced this one
            (self._directory / number).unlink(missing_ok=True)

    def close(self):
        """Kill the nodes that this process has started."""
        gevent.killall(self._greenlets)
        if self._temporary:
            self._temporary.cleanup()

    def _keep_running(self, number):
        while True:
            try:
                self._run(number)
            except OSError as error:
                print(f"node {number}: {error}")
            gevent.sleep(RESTART_DELAY_S)

    def _run(self, number):
        links = ["--cluster-directory", self._directory, "--cluster-node", number]
        command = [sys.executable, "-m", "smqrt", "serve", self._app, "--port", "0", *links]
        # The nodes must not inherit the settings of this server.
        environment = {name: value for name, value in os.environ.items() if "SMQRT_" not in name}
        environment["SMQRT_ADMIN__ENABLED"] = "false"  # otherwise commands such as `smqrt top` would find the nodes too
        port, pipe = "", subprocess.PIPE
        with subprocess.Popen(command, cwd=self._app, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                for line in process.stdout or ():  # until the process exits
                    if found := LISTENS.search(line):
                        port = found[1]
                        self._write_port(number, port)
            finally:
                self._remove_port(number, port)
                process.kill()
