"""A Python for Spark whose workers start without the cost of their imports.

Spark starts a process for each source of a stream. Most of its CPU time is the import of pyspark, pyarrow and smqrt,
and the tests start hundreds of streams. A fork server has imported them; the process that Spark starts asks it for a
fork, passes signals on to it, and ends with it. Other programs of Spark are the usual Python.

Run with a folder, this file is the fork server; run with `-m MODULE`, it is the process that Spark starts.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = "pyspark.sql.streaming.python_streaming_source_runner"
FORKS = "forks"
REQUEST_BYTES = 256 * 1024


@contextlib.contextmanager
def spark_python(folder: Path, python_path: str) -> Iterator[Path]:
    """Start a fork server; give the program that Spark should start as its Python.

    Args:
        folder: an empty one, for the program and the socket of the fork server.
        python_path: PYTHONPATH of Spark's workers.
    """
    program = folder / "python"
    client = f'exec "{sys.executable}" -SE "{__file__}" "$@"'
    program.write_text(f'#!/bin/sh\nif [ "$2" = {SOURCE} ]; then {client}; fi\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    command = [sys.executable, __file__, str(folder)]
    environment = os.environ | {"PYTHONPATH": python_path}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        yield program
        server.stdin.close()  # which ends it


def serve_forks(folder: str) -> None:
    """Fork for each connection until stdin is closed."""
    import runpy

    __import__(SOURCE)
    __import__("smqrt.pipeline.smq_source.reading")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/{FORKS}")
    listener.listen(100)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork: its end closes its connection
    print("ready", flush=True)
    while select.select([listener, 0], [], [])[0] == [listener]:
        connection, _ = listener.accept()
        data, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if os.fork():
            connection.close()
            for fd in fds:
                os.close(fd)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        arguments, cwd, environment = json.loads(data)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.orig_argv = [sys.executable, *arguments]
        sys.argv = [SOURCE]
        connection.send(str(os.getpid()).encode())
        runpy.run_path(str(Path(__file__).parents[2] / "smqrt/pipeline/helper/sitecustomize.py"))
        runpy.run_module(SOURCE, run_name="__main__", alter_sys=True)
        return


def be_a_fork(folder: str, arguments: list[str]) -> None:
    """Wait for a fork of the server that does the work of this process."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"{folder}/{FORKS}")
    request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [request], [1, 2])
    pid = int(server.recv(100))
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    server.recv(1)  # nothing, at its end


if __name__ == "__main__":
    if sys.argv[1] == "-m":
        be_a_fork(os.path.dirname(os.environ["PYSPARK_PYTHON"]), sys.argv[1:])
    else:
        serve_forks(sys.argv[1])
