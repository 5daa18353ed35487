"""Driver of `smqrt.client.SmqClient` for the client cases; see the README of this folder."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import gevent
from gevent.event import Event
from gevent.fileobject import FileObjectThread

from smqrt.client import SmqClient
from smqrt.errors import SmqrtError


def emit(answer: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def payload_of(command: dict[str, Any]) -> bytes:
    """Return the payload of a command, which has `text`, `base64` or `repeat`."""
    if "base64" in command:
        return base64.b64decode(command["base64"])
    if "repeat" in command:
        return (command["repeat"]["text"] * command["repeat"]["times"]).encode()
    return command["text"].encode()


def shown(data: bytes) -> dict[str, str]:
    """Return a payload as `text`, or as `base64` when it is not UTF-8."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def topic_of(command: dict[str, Any]) -> Any:
    """Return the topic of a command, a name or an ETID."""
    return command["etid"] if "etid" in command else command["topic"]


class Client:
    """One client of a case."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.smq: SmqClient
        self.prefix: bytes | None = None
        self.may_run = Event()
        self.may_run.set()

    def event(self, kind: str, **fields: Any) -> None:
        """Report an event."""
        emit({"client": self.name, "event": kind, **fields})

    # ---- callbacks

    def on_close(self, reason: str | None, can_reconnect: bool) -> bool | float:
        self.event("disconnected", reason=reason)
        return 0.05 if can_reconnect and self.reconnects else False

    def on_message(self, data: bytes, ptid: int, tid: int, subtid: int) -> None:
        self.may_run.wait()
        if tid == self.smq.gettid() and subtid and self.prefix is not None:
            self.smq.publish(self.prefix + data, ptid, subtid)
            return
        topic = "self" if tid == self.smq.gettid() else self.smq.tid2topic(tid)
        subtopic = self.smq.tid2subtopic(subtid) if subtid else None
        self.event("message", topic=topic, subtopic=subtopic, **{"from": ptid}, **shown(data))

    # ---- commands

    def connect(self, command: dict[str, Any]) -> None:
        options = {"timeout": 10.0, **command.get("options", {})}
        self.reconnects = options.pop("reconnect", True)
        for name in ("uid", "info"):
            if name in command:
                options[name] = command[name]
        if "password" in command:
            options["onauth"] = lambda rnd, ip: command["password"]
        self.smq = SmqClient(
            command["url"],
            options,
            onconnect=lambda etid, rnd, ip: self.event("connected", etid=etid),
            onreconnect=lambda etid, rnd, ip: self.event("reconnected", etid=etid),
            onclose=self.on_close,
            onmsg=self.on_message,
        )
        self.smq.on_end(lambda: self.event("closed", reason=self.smq.end and self.smq.end.word))

    def subscribe(self, command: dict[str, Any]) -> None:
        def onack(accepted: bool, topic: Any, *_: Any) -> None:
            self.event("subscribed", topic=topic, accepted=accepted)

        self.smq.subscribe(command["topic"], command.get("subtopic"), onmsg=self.on_message, onack=onack)

    def unsubscribe(self, command: dict[str, Any]) -> None:
        self.smq.unsubscribe(command["topic"])

    def create(self, command: dict[str, Any]) -> None:
        self.smq.create(command["topic"], lambda accepted, topic, tid: self.event("created", topic=topic, tid=tid))

    def createsub(self, command: dict[str, Any]) -> None:
        self.smq.createsub(
            command["subtopic"], lambda accepted, name, stid: self.event("created", subtopic=name, stid=stid)
        )

    def publish(self, command: dict[str, Any]) -> None:
        if not self.smq.publish(payload_of(command), topic_of(command), command.get("subtopic")):
            raise SmqrtError("the send queue is full")

    def observe(self, command: dict[str, Any]) -> None:
        self.smq.observe(
            topic_of(command),
            lambda count, topic: self.event(
                "change", subscribers=count, **{"etid" if isinstance(topic, int) else "topic": topic}
            ),
        )

    def unobserve(self, command: dict[str, Any]) -> None:
        self.smq.unobserve(topic_of(command))

    def request(self, command: dict[str, Any]) -> dict[str, str]:
        return shown(self.smq.request(command["etid"], payload_of(command), command["timeout_ms"] / 1000).data)

    def answer(self, command: dict[str, Any]) -> None:
        self.prefix = command["prefix"].encode()

    def pause(self, command: dict[str, Any]) -> None:
        self.may_run.clear()

    def resume(self, command: dict[str, Any]) -> None:
        self.may_run.set()

    def disconnect(self, command: dict[str, Any]) -> None:
        self.smq.disconnect(command.get("text", ""))

    def close(self, command: dict[str, Any]) -> None:
        self.may_run.set()
        self.smq.close(2)

    def state(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"connected": self.smq.connected, "etid": self.smq.gettid()}


def run(client: Client, command: dict[str, Any]) -> None:
    """Run a command and answer it."""
    try:
        emit({"id": command["id"], "ok": True, **(getattr(client, command["do"])(command) or {})})
    except Exception as error:
        emit({"id": command["id"], "error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Run the commands of standard input. Those that wait run in a greenlet of their own."""
    clients: dict[str, Client] = {}
    for line in FileObjectThread(sys.stdin.buffer, "rb"):
        command = json.loads(line)
        client = clients.get(command["client"]) or clients.setdefault(command["client"], Client(command["client"]))
        if command["do"] in ("request", "close"):
            gevent.spawn(run, client, command)
        else:
            run(client, command)


main()
