"""Driver of Lua's `smq.client` for the client cases: a runtime with `lua.lua`; see the README of this folder."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

from gevent.fileobject import FileObjectThread

from smqrt.apps.lua import api
from smqrt.apps.lua.api.smq_client import install_smq_client
from smqrt.apps.lua.vm import LuaError, Services, Vm
from smqrt.clients.backoff import Backoff

PROGRAM = Path(__file__).with_suffix(".lua").read_bytes()


def emit(answer: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def text_of(value: Any) -> Any:
    """Return a value of Lua for JSON."""
    return value.decode() if isinstance(value, bytes) else value


def event(client: bytes, kind: bytes, *pairs: Any) -> None:
    """Report an event with the fields `name, value, ...`; the field "data" is a payload."""
    fields = {name.decode(): value for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
    if "data" in fields:
        data = fields.pop("data")
        try:
            fields["text"] = data.decode()
        except UnicodeDecodeError:
            fields["base64"] = base64.b64encode(data).decode()
    emit({"client": client.decode(), "event": kind.decode(), **{name: text_of(one) for name, one in fields.items()}})


def payload_of(command: dict[str, Any]) -> bytes:
    """Return the payload of a command; empty when it has none."""
    if "base64" in command:
        return base64.b64decode(command["base64"])
    if "repeat" in command:
        return (command["repeat"]["text"] * command["repeat"]["times"]).encode()
    return str(command.get("text", "")).encode()


def main() -> None:
    """Run the commands of standard input."""
    Backoff.next_s = lambda self: 0.05  # type: ignore[method-assign]  # `true` of onclose means the usual delay
    vm = Vm()
    services = Services()
    api.install(vm, services)
    install_smq_client(vm, services)
    vm.namespace("driver", {"event": event}, source=b"local core, py = ...\ndriver = py")
    vm.eval(PROGRAM, "@lua.lua")
    for line in FileObjectThread(sys.stdin.buffer, "rb"):
        command = json.loads(line)
        arguments = json.dumps({name: value for name, value in command.items() if name not in ("repeat", "base64")})
        try:
            values = vm.eval("return run(...)", "=command", arguments.encode(), payload_of(command))
        except LuaError as error:
            emit({"id": command["id"], "error": str(error)})
        else:
            emit({"id": command["id"], "ok": True, **({"text": text_of(values[0])} if values else {})})


main()
