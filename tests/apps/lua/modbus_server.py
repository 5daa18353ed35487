"""Modbus servers for tests: pymodbus as a process, and one that answers what a test says."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gevent.server import StreamServer

from tests.support.waiting import wait_until

_PROGRAM = """
import asyncio, sys
from pymodbus.datastore import ModbusDeviceContext, ModbusSequentialDataBlock, ModbusServerContext
from pymodbus.server import ModbusTcpServer

async def main():
    def device():
        first = {"di": [True] * 500, "co": [False] * 500, "hr": [0] * 500, "ir": list(range(500))}
        return ModbusDeviceContext(**{name: ModbusSequentialDataBlock(1, values) for name, values in first.items()})
    server = ModbusTcpServer(ModbusServerContext({1: device(), 7: device()}, single=False), address=("127.0.0.1", 0))
    task = asyncio.create_task(server.serve_forever())
    while server.transport is None:
        await asyncio.sleep(0.01)
    print(server.transport.sockets[0].getsockname()[1], flush=True)
    await task

asyncio.run(main())
"""


class PyModbus:
    """pymodbus on a free port, with units 1 and 7: coils false, discrete inputs true, holding registers 0, input
    registers 0, 1, 2 and so on.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


Answer = Callable[[bytes], bytes | None]


class ScriptedModbus:
    """A server that gives each request, as bytes, to a function; None: no answer.

    Attributes:
        requests: what came.
        open: how many connections are open.
    """

    def __init__(self, answer: Answer, context: Any = None) -> None:
        self._answer = answer
        self.requests: list[bytes] = []
        self.open = 0
        options = {"ssl_context": context} if context else {}
        self._server = StreamServer(("127.0.0.1", 0), self._serve, **options)
        self._server.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def __enter__(self) -> ScriptedModbus:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0)

    def wait_closed(self) -> None:
        wait_until(lambda: not self.open)

    def _serve(self, client: Any, _address: Any) -> None:
        self.open += 1
        try:
            with client.makefile("rb") as stream:
                while head := stream.read(6):
                    request = head + stream.read(struct.unpack(">H", head[4:])[0])
                    self.requests.append(request)
                    if (answer := self._answer(request)) is not None:
                        client.sendall(answer)
        except OSError:
            pass
        finally:
            self.open -= 1
            client.close()


def response(request: bytes, pdu: bytes) -> bytes:
    """The response to a request."""
    return request[:4] + struct.pack(">H", len(pdu) + 1) + request[6:7] + pdu
