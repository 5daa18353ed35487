"""MQTT clients with a store that kill themselves at a write; run as a process by `test_store`.

Each line of the input starts a client in a copy of the process: port, path of the store, the first number, how many
messages, at which write to end (0: never), and the maximum size of files in bytes (0: none). The client prints what it
has handed in and what it got. After SIGUSR1 it delivers everything and ends.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event

from smqrt.clients.mqtt import connection, store
from smqrt.errors import StoreError
from smqrt.mqtt import MqttClient

writes = 0


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def mortal(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, with the end of the process before or after one of its calls."""

    def call(*arguments: Any) -> Any:
        end_at(at)
        value = function(*arguments)
        end_at(at)
        return value

    return call


def end_at(at: int) -> None:
    global writes
    writes += 1
    if writes == at:
        os.kill(os.getpid(), signal.SIGKILL)


def run(port: str, path: str, *numbers: str) -> None:
    first, count, at, limit_bytes = map(int, numbers)
    is_told = Event()
    gevent.signal_handler(signal.SIGUSR1, is_told.set)
    say(f"pid {os.getpid()}")
    store.write_changes = mortal(store.write_changes, at)
    connection.MqttConnection._send = mortal(connection.MqttConnection._send, at)  # type: ignore[method-assign]
    client = MqttClient(
        f"127.0.0.1:{port}",
        lambda *_: 0.1,
        lambda topic, payload, *_: say(f"got {payload.decode()}"),
        properties={"sessionexpiryinterval": 3600},
        store=path,
        clientidentifier="mortal",
    )
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    client.subscribe("in", qos=2)
    for number in range(first, first + count):
        try:
            client.publish("out", f"{number}".ljust(1000 if limit_bytes else 1), 1 + number % 2)
        except StoreError as error:
            say(f"full {error}")
            break
        say(f"handed {number}")
    is_told.wait()
    client.flush(20)
    client.close()


def main() -> None:
    while line := sys.stdin.readline():
        child = os.fork()  # faster than a new process, which has to import everything
        if not child:
            run(*line.split())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        say(f"exit {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
