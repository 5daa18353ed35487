"""The cases of `clients.json`: the drivers, the hub, the player, and the page of the manual with the results."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gevent
from gevent.event import AsyncResult
from gevent.fileobject import FileObjectThread

from smqrt import hub
from smqrt.http.message import Request
from smqrt.http.server import HttpServer
from smqrt.http.tree import Directory, Root
from smqrt.transport.listener import Listener
from tests.conftest import START_S
from tests.support import npm
from tests.support.micropython import find_micropython
from tests.support.waiting import PATIENCE_S, wait_until

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "smqrt/help/client-conformance.md"
DRIVERS = HERE / "client_drivers"
Json = dict[str, Any]


def cases() -> list[Json]:
    """Returns the cases in the order of the page."""
    return json.loads((HERE / "clients.json").read_text("utf-8"))  # type: ignore[no-any-return]


class Entry(NamedTuple):
    """An entry of `client_drivers/drivers.json`.

    Attributes:
        name, what: of the client, for the page.
        command: the program; `{python}` is this Python, and scripts/test installs `{node}` and `{micropython}`.
        schemes: the kinds of URLs that the client knows, the one for most cases first.
        lacks: what the client cannot do, in the words of `needs` of the cases.
        part: the part of the tests that installs what it uses.
    """

    name: str
    what: str
    command: list[str]
    schemes: list[str]
    lacks: list[str]
    part: str = "unit"

    def missing(self, case: Json) -> list[str]:
        """Returns what a case needs and this client cannot do."""
        needs = [one for one in case.get("needs", []) if one in self.lacks]
        return needs + [one for one in schemes_of(case) if one not in self.schemes]


def schemes_of(case: Json) -> list[str]:
    """Returns the kinds of URLs that a case names."""
    return [step["scheme"] for step in case["steps"] if "scheme" in step]


def entries() -> list[Entry]:
    """Returns the drivers in the order of the page."""
    return [Entry(**one) for one in json.loads((DRIVERS / "drivers.json").read_text("utf-8"))]


class Driver:
    """A driver program that runs, for all cases of a client.

    Attributes:
        events: by client and kind, in their order.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        programs = {
            "{python}": lambda: sys.executable,
            "{node}": lambda: str(npm.COMMANDS / "node"),
            "{micropython}": find_micropython,
        }
        command = [programs[word]() if word in programs else word for word in entry.command]
        self._process = subprocess.Popen(command, cwd=DRIVERS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._input = FileObjectThread(self._process.stdin, "wb")
        self._answers: dict[int, AsyncResult[Json]] = {}
        self._last, self._is_running = 0, False
        self.events: dict[tuple[str, str], deque[Json]] = defaultdict(deque)
        self._reading = gevent.spawn(self._read)

    def _read(self) -> None:
        for line in FileObjectThread(self._process.stdout, "rb"):
            answer = json.loads(line)
            if "id" in answer:
                self._answers.pop(answer["id"]).set(answer)
            else:
                self.events[answer["client"], answer["event"]].append(answer)

    def send(self, command: Json) -> AsyncResult[Json]:
        """Sends a command, and returns its future answer."""
        self._last += 1
        answer = self._answers[self._last] = AsyncResult()
        line = json.dumps({"id": self._last, **command}, ensure_ascii=False)  # some languages cannot join surrogates
        self._input.write(line.encode() + b"\n")
        self._input.flush()
        return answer

    def wait(self, answer: AsyncResult[Json]) -> Json:
        """Returns an answer. The first one takes as long as the start of the program."""
        patience_s = PATIENCE_S if self._is_running else START_S
        wait_until(lambda: answer.ready() or self._reading.dead, f"an answer of {self.entry.name}", patience_s)
        assert answer.ready(), f"the driver of {self.entry.name} has ended"
        self._is_running = True
        return answer.get()

    def event(self, client: str, kind: str) -> Json:
        """Returns the next event of a client and kind."""
        found = self.events[client, kind]
        wait_until(lambda: found or self._reading.dead, f"the event {kind} of {client}; there are {dict(self.events)}")
        assert found, f"the driver of {self.entry.name} has ended"
        return found.popleft()

    def close(self) -> None:
        self._input.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reading.kill()


class CaseHub:
    """The hub of one case: it can be stopped and started, and keeps what clients have sent to it."""

    def __init__(self, options: Json) -> None:
        self._options = options
        self.smq: hub.Smq | None = None
        self.closed: list[tuple[int, str]] = []
        self.messages: list[tuple[bytes, int]] = []
        self.start()

    def start(self) -> None:
        login, deny = self._options.get("login"), self._options.get("deny", [])
        options = {name: self._options[name] for name in ("budget", "slow") if name in self._options}
        self.smq = hub.create(
            authenticate=lambda credentials, info: 0 if login is None or credentials == login.encode() else (3, "no"),
            permittop=lambda topic, issub, peer: topic not in deny,
            permitsubtop=lambda subtopic, peer: subtopic not in deny,
            onclose=lambda etid, sock, peer, err, reason: self.closed.append((etid, reason)),
            onmsg=self._on_message,
            **options,
        )

    def _on_message(self, data: bytes, ptid: int, tid: int, subtid: int) -> None:
        self.messages.append((data, ptid))
        if "answer" in self._options:
            assert self.smq is not None
            self.smq.publish(self._options["answer"].encode() + data, ptid, subtid)

    def stop(self) -> None:
        """Closes the connections as a server that is killed."""
        if self.smq is not None:
            self.smq.shutdown()
            self.smq.close()
        self.smq = None


class Hubs:
    """A server with a hub for each case, at `/1/smq.lsp` and so on."""

    def __init__(self) -> None:
        directory = Directory()
        directory.func = self._connect
        root = Root()
        root.insert(directory)
        self._http = HttpServer(root)
        self._listener = Listener("127.0.0.1", 0, self._http.accepted)
        self._listener.start()
        self._hubs: dict[str, CaseHub] = {}

    def _connect(self, request: Request, path: str) -> bool:
        case = self._hubs.get(path)
        if case is None:
            return False
        if case.smq is None:
            request.response.senderror(503)
            return True
        case.smq.connect(request)
        return True

    def create(self, options: Json) -> tuple[CaseHub, str]:
        """Returns a new hub, and its address without the scheme."""
        path = f"{len(self._hubs) + 1}/smq.lsp"
        self._hubs[path] = CaseHub(options)
        return self._hubs[path], f"127.0.0.1:{self._listener.address[1]}/{path}"

    def close(self) -> None:
        self._listener.close()
        for one in self._hubs.values():
            one.stop()
        self._http.close()


class Player:
    """Plays one case with one client.

    Args:
        case: the case.
        driver: of the client.
        hubs: the server.
    """

    _cases = 0

    def __init__(self, case: Json, driver: Driver, hubs: Hubs) -> None:
        Player._cases += 1
        self._case, self._driver, self._number = case, driver, Player._cases
        self._hub, self._address = hubs.create(case.get("hub", {}))
        self._values: dict[str, Any] = {}
        self._clients: list[str] = []
        self._uid = f"uid-of-case-{self._number}"

    def play(self) -> None:
        """Plays the steps. Raises AssertionError for the first one that fails."""
        try:
            for number, step in enumerate(self._case["steps"], 1):
                try:
                    self._play(step)
                except AssertionError as error:
                    raise AssertionError(f"{self._case['name']}, step {number} {json.dumps(step)}: {error}") from error
            for client in self._clients if self._case.get("complete", True) else ():
                assert not self._driver.events[client, "message"], f"{client} got more messages"
        finally:
            answers = [self._driver.send({"client": client, "do": "close"}) for client in self._clients]
            for answer in answers:
                self._driver.wait(answer)
            self._hub.stop()

    def _play(self, step: Json) -> None:
        if "hub" in step:
            getattr(self, f"_hub_{step['hub']}")(step)
        elif "expect" in step:
            for number in range(step.get("count", 1)):
                self._expect(step, number)
        elif step["do"] == "connect":
            self._connect(step)
        else:
            self._command(step)

    # ---- clients

    def _name(self, letter: str) -> str:
        return f"{self._number}{letter}"

    def _connect(self, step: Json) -> None:
        client = self._name(step["client"])
        if client not in self._clients:
            self._clients.append(client)
        scheme = step.get("scheme", self._driver.entry.schemes[0])
        address = step.get("address", self._address)
        command = {name: step[name] for name in ("info", "password", "options") if name in step}
        if step.get("uid"):
            command["uid"] = self._uid
        self._ask({"client": client, "do": "connect", "url": f"{scheme}://{address}", **command}, step)
        if step.get("until", "connected") == "connected":
            self._values[step["client"].upper()] = self._driver.event(client, "connected")["etid"]

    def _command(self, step: Json) -> None:
        hidden = ("accepted", "returns", "error", "count", "later")
        command = {name: self._value(one) for name, one in step.items() if name not in hidden}
        command["client"] = self._name(step["client"])
        count, texts = step.get("count", 1), command.get("text", "")
        waiting = []
        for number in range(count):
            waiting.append(self._driver.send(numbered(command, texts, number)))
        for answer in waiting:
            self._check(self._driver.wait(answer), step)
        if step["do"] == "subscribe":
            event = self._driver.event(command["client"], "subscribed")
            assert (event["topic"], event["accepted"]) == (step["topic"], step.get("accepted", True)), event

    def _ask(self, command: Json, step: Json) -> None:
        self._check(self._driver.wait(self._driver.send(command)), step)

    def _check(self, answer: Json, step: Json) -> None:
        assert ("error" in answer) is step.get("error", False), answer
        if "returns" in step:
            assert answer["text"] == step["returns"], answer

    def _expect(self, step: Json, number: int) -> None:
        event = self._driver.event(self._name(step["client"]), step["expect"])
        wanted = {name: one for name, one in step.items() if name not in ("client", "expect", "count", "skip")}
        for _ in range(step.get("skip", 0)):  # other events may come before
            if all(event.get(name) == self._value(value) for name, value in wanted.items()):
                break
            event = self._driver.event(self._name(step["client"]), step["expect"])
        if "repeat" in wanted:
            repeated = wanted.pop("repeat")
            assert event.get("text") == repeated["text"] * repeated["times"], f"{len(event.get('text', ''))} characters"
        for name, value in numbered(wanted, wanted.get("text", ""), number).items():
            if isinstance(value, str) and value.startswith("="):
                self._values[value[1:]] = event[name]
                continue
            assert event.get(name) == self._value(value), {one: str(event[one])[:100] for one in event}

    def _value(self, value: Any) -> Any:
        """Returns the value of `$A`, the ETID of client a."""
        return self._values[value[1:]] if isinstance(value, str) and value.startswith("$") else value

    # ---- the hub

    def _smq(self) -> hub.Smq:
        assert self._hub.smq is not None
        return self._hub.smq

    def _hub_stop(self, step: Json) -> None:
        self._hub.stop()

    def _hub_start(self, step: Json) -> None:
        self._hub.start()

    def _hub_shutdown(self, step: Json) -> None:
        self._smq().shutdown(step["text"], None if "etid" not in step else self._value(step["etid"]))

    def _hub_publish(self, step: Json) -> None:
        topic = self._value(step["etid"]) if "etid" in step else step["topic"]
        for number in range(step.get("count", 1)):
            if "repeat" in step:
                data = (step["repeat"]["text"] * step["repeat"]["times"]).encode()
            elif "base64" in step:
                data = base64.b64decode(step["base64"])
            else:
                data = numbered(step, step["text"], number)["text"].encode()
            self._smq().publish(data, topic, step.get("subtopic"))

    def _hub_flood(self, step: Json) -> None:
        """Publishes in one turn of the loop, which overflows the queues of subscribers."""
        for _ in range(step["count"]):
            self._smq().publish(b"x" * step["bytes"], step["topic"])

    def _hub_receives(self, step: Json) -> None:
        wait_until(lambda: self._hub.messages, "a message to the server")
        data, etid = self._hub.messages.pop(0)
        assert (data.decode(), etid) == (step["text"], self._value(step["from"]))

    def _hub_closes(self, step: Json) -> None:
        etid = self._value(step["etid"])
        reasons = wait_until(lambda: [reason for one, reason in self._hub.closed if one == etid], self._hub.closed)
        assert reasons == [step["reason"]]

    def _hub_knows(self, step: Json) -> None:
        peer = self._smq().etid2peer(self._value(step["etid"]))
        assert peer is not None
        assert peer.info == step["info"]
        assert peer.uid == self._uid


def numbered(fields: Json, text: Any, number: int) -> Json:
    """Returns the fields with the number in place of `#` of the text."""
    return {**fields, "text": text.replace("#", str(number))} if text else fields


# ---- the page


def page() -> str:
    """Returns the page of the manual."""
    clients, played = entries(), cases()
    parts = [_HEAD.format(cases=len(played), clients="".join(f"| {one.name} | {one.what} |\n" for one in clients))]
    for group in dict.fromkeys(case["group"] for case in played):
        parts.append(f"\n## {group}\n\n| case | {' | '.join(one.name for one in clients)} |\n")
        parts.append("|---" * (len(clients) + 1) + "|\n")
        for case in (one for one in played if one["group"] == group):
            cells = [_cell(one.missing(case)) for one in clients]
            parts.append(f"| {case['name']} | {' | '.join(cells)} |\n")
    parts.append(_MISSING)
    for one in clients:
        if one.lacks:
            parts.append(f"* {one.name}: " + ", ".join(_WORDS[word] for word in one.lacks) + "\n")
    return "".join(parts)


def _cell(missing: list[str]) -> str:
    return f"not supported: {', '.join(missing)}" if missing else "yes"


def needs() -> Iterator[str]:
    """Yields the words of `needs` of all cases."""
    for case in cases():
        yield from case.get("needs", [])


_WORDS = {
    "request": "`request` (no function of its own; a program publishes to the etid with a number as sub-topic)",
    "restore": "`restore` (subscriptions and names after a reconnect; programs subscribe again in `onconnect`)",
    "send later": "`send later` (messages that are published without a connection are rejected)",
    "pause": "`pause` (the program cannot delay its handler, so messages are queued in the program)",
    "observe": "`observe`",
    "answer": "`answer` (requests of other clients)",
    "createsub": "`createsub` (the number of a sub-topic without a subscription)",
}
_HEAD = """# Client conformance

This page lists what each client does in the same situations. Tests play {cases} cases with each client, against a hub
of `smqrt`. The cases are data in `tests/conformance/clients.json`; the README of that folder describes their form, and
the driver that a client of another language needs.

| client | what |
|---|---|
{clients}
"yes" means that the client passes the case in every run of the tests. [Clients](clients.md) describes the functions.
"""
_MISSING = """
## What is not supported

A case that needs one of these has the word in its row:

"""
