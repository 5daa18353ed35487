"""Driver of `smqrt.aio.SmqClient` for the client cases; see the README of this folder."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

from smqrt.aio import Message, SmqClient, Subscription
from smqrt.errors import DeniedError, SmqrtError


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
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.subscriptions: dict[tuple[str, str | None], Subscription] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def event(self, kind: str, **fields: Any) -> None:
        """Report an event."""
        emit({"client": self.name, "event": kind, **fields})

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine in a task."""
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # ---- callbacks and loops

    def on_close(self, reason: str | None, can_reconnect: bool) -> bool | float:
        self.event("disconnected", reason=reason)
        return 0.05 if can_reconnect and self.reconnects else False

    async def report_end(self) -> None:
        await self.smq.wait_closed()
        self.event("closed", reason=self.smq.end and self.smq.end.word)

    async def on_message(self, data: bytes, ptid: int, tid: int, subtid: int) -> None:
        await self.may_run.wait()
        if tid == self.smq.gettid() and subtid and self.prefix is not None:
            await self.smq.publish(self.prefix + data, ptid, subtid)
            return
        topic = "self" if tid == self.smq.gettid() else self.smq.tid2topic(tid)
        subtopic = self.smq.tid2subtopic(subtid) if subtid else None
        self.event("message", topic=topic, subtopic=subtopic, **{"from": ptid}, **shown(data))

    async def read(self, topic: str, subtopic: str | None) -> None:
        if (topic, subtopic) in self.subscriptions:  # the clients with callbacks replace them
            self.subscriptions.pop((topic, subtopic)).stop()
        try:
            async with self.smq.subscribe(topic, subtopic) as messages:
                self.subscriptions[topic, subtopic] = messages
                self.event("subscribed", topic=topic, accepted=True)
                async for message in messages:
                    await self.on_message(message.data, message.etid, message.tid, message.subtid)
        except DeniedError:
            self.event("subscribed", topic=topic, accepted=False)

    async def watch(self, topic: Any) -> None:
        async for count in self.smq.observe(topic):
            self.event("change", subscribers=count, **{"etid" if isinstance(topic, int) else "topic": topic})

    # ---- commands

    async def connect(self, command: dict[str, Any]) -> None:
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
        await self.smq.start()
        self.spawn(self.report_end())

    async def subscribe(self, command: dict[str, Any]) -> None:
        self.spawn(self.read(command["topic"], command.get("subtopic")))

    async def unsubscribe(self, command: dict[str, Any]) -> None:
        self.smq.unsubscribe(command["topic"])

    async def create(self, command: dict[str, Any]) -> None:
        self.event("created", topic=command["topic"], tid=await self.smq.create(command["topic"]))

    async def createsub(self, command: dict[str, Any]) -> None:
        self.event("created", subtopic=command["subtopic"], stid=await self.smq.createsub(command["subtopic"]))

    async def publish(self, command: dict[str, Any]) -> None:
        await self.smq.publish(payload_of(command), topic_of(command), command.get("subtopic"))

    async def observe(self, command: dict[str, Any]) -> None:
        self.spawn(self.watch(topic_of(command)))
        await asyncio.sleep(0)

    async def unobserve(self, command: dict[str, Any]) -> None:
        self.smq.unobserve(topic_of(command))

    async def request(self, command: dict[str, Any]) -> dict[str, str]:
        answer: Message = await self.smq.request(command["etid"], payload_of(command), command["timeout_ms"] / 1000)
        return shown(answer.data)

    async def answer(self, command: dict[str, Any]) -> None:
        self.prefix = command["prefix"].encode()

    async def pause(self, command: dict[str, Any]) -> None:
        self.may_run.clear()

    async def resume(self, command: dict[str, Any]) -> None:
        self.may_run.set()

    async def disconnect(self, command: dict[str, Any]) -> None:
        self.smq.disconnect(command.get("text", ""))

    async def close(self, command: dict[str, Any]) -> None:
        self.may_run.set()
        await self.smq.close(2)

    async def state(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"connected": self.smq.connected, "etid": self.smq.gettid()}


async def run(client: Client, command: dict[str, Any]) -> None:
    """Run a command and answer it."""
    try:
        emit({"id": command["id"], "ok": True, **(await getattr(client, command["do"])(command) or {})})
    except (SmqrtError, LookupError, ValueError, AttributeError) as error:
        emit({"id": command["id"], "error": f"{type(error).__name__}: {error}"})


async def main() -> None:
    """Run the commands of standard input. Those that wait run in a task of their own."""
    clients: dict[str, Client] = {}
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        client = clients.get(command["client"]) or clients.setdefault(command["client"], Client(command["client"]))
        if command["do"] in ("request", "close", "create", "createsub"):
            client.spawn(run(client, command))
        else:
            await run(client, command)


asyncio.run(main())
