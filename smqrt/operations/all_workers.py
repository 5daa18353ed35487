"""Answers for operators of all workers of a server, as if it were one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import thread_time
from typing import Any, NamedTuple

from smqrt.errors import ArgumentError, SmqrtError
from smqrt.http.headers import HttpError
from smqrt.operations import api_handlers as answers
from smqrt.operations import snapshots, topic_listener
from smqrt.operations.api_handlers import Answer, Body
from smqrt.operations.context import Parts
from smqrt.operations.metrics import Metrics
from smqrt.operations.paging import LIMIT, Arguments
from smqrt.operations.topic_listener import QUESTION as LISTEN
from smqrt.operations.topic_listener import FarListening, Listener, Listening, listened
from smqrt.smq.gevent_broker import all_brokers
from smqrt.workers.fd_channel import Message
from smqrt.workers.worker_identity import worker_of_hub
from smqrt.workers.worker_rpc import END, Events, News, WorkerRpc, WorkerRpcServer

# ---- What several workers answer an operator, as one answer: rows side by side, counters summed up.

Answers = dict[int, Any]
"""By the number of the worker, in their order."""

_SUMS = ("cpu_s", "memory_bytes", "open_files", "open_files_limit", "connections", "hubs", "peers", "queued_bytes",
         "lua_memory_bytes", "lua_activities", "log_errors", "log_warnings", "log_errors_lately")  # fmt: skip
_WORST = ("loop_lag_s", "loop_lag_worst_s", "loop_lag_5s_s")
_OF_A_WORKER = ("pid", "phase", "uptime_s", *_SUMS, *_WORST)
_OF_A_LISTENER = ("accepted", "open", "refused", "reassigned", "given", "handshakes", "handshakes_failed")


def server(answers: Answers, arguments: Arguments) -> object:
    """Returns the server as a whole, and below `workers` what each of them is."""
    whole = dict(_first(answers))
    for name in _SUMS:
        whole[name] = sum(one[name] for one in answers.values())
    for name in _WORST:
        whole[name] = max(one[name] for one in answers.values())
    told = dict.fromkeys(text for one in answers.values() for text in one["obstacles"])
    whole["obstacles"], whole["ready"] = list(told), not told
    whole["workers"] = [
        {"worker": number, **{name: one[name] for name in _OF_A_WORKER}} for number, one in answers.items()
    ]
    return whole


def listeners(answers: Answers, arguments: Arguments) -> object:
    """Returns the ports, with the sums of their counters."""
    by_name = {number: {one["name"]: one for one in rows} for number, rows in answers.items()}
    return [
        {**row, **{name: sum(one[row["name"]].get(name, 0) for one in by_name.values()) for name in _OF_A_LISTENER}}
        for row in _first(answers)
    ]


def side_by_side(answers: Answers, arguments: Arguments) -> object:
    """Returns the rows of all, each with its worker."""
    return [{**row, "worker": number} for number, rows in answers.items() for row in rows]


def first(answers: Answers, arguments: Arguments) -> object:
    """Returns what worker 0 says; it is the only one that knows."""
    return _first(answers)


def apps(answers: Answers, arguments: Arguments) -> object:
    """Returns the applications; one that does not run everywhere is shown as the worker has it that has the trouble."""
    rows = {row["name"]: row for row in _first(answers)}
    for number, answer in answers.items():
        for row in answer:
            if rows.get(row["name"], row)["state"] == "running" != row["state"]:
                rows[row["name"]] = {**row, "worker": number}
    return list(rows.values())


def limits(answers: Answers, arguments: Arguments) -> object:
    """Returns the limits, with how often each was reached in all, and what was refused last."""
    merged = []
    for rows in zip(*answers.values(), strict=False):
        latest = max(rows, key=lambda row: row["last_at"] or "")
        merged.append({**latest, "reached": sum(row["reached"] for row in rows)})
    return merged


def peers(answers: Answers, arguments: Arguments) -> object:
    """Returns a page of the clients of all: hubs have their worker in their number, so it is in their order, too."""
    sort = arguments.get("sort", "")
    by_size: dict[str, Callable[[Any], Any]] = {"newest": lambda row: -row["connected_s"]}
    key = by_size.get(sort, lambda row: row[sort]) if sort else lambda row: (-row["hub"], -row["etid"])
    return _page(answers, arguments, key, lambda row: str(row["id"]), is_last=bool(sort))


def newest(answers: Answers, arguments: Arguments) -> object:
    """Returns the last endings of connections, or lines of the log, of all, the newest first. Their numbers are each
    worker's own: no page is behind."""
    return _page(answers, arguments, lambda row: row["at"], lambda row: str(row["number"]), is_last=True)


def traces(answers: Answers, arguments: Arguments) -> object:
    """Returns the last lines that each application traced, in any worker, in the order of their time."""
    limit = int(arguments.get("limit", LIMIT))
    lines: dict[str | None, list[Any]] = {row["app"]: [] for row in _first(answers)}
    for number, rows in answers.items():
        for row in rows:
            lines.setdefault(row["app"], []).extend({**line, "worker": number} for line in row["lines"])
    return [{"app": app, "lines": sorted(found, key=lambda one: one["at"])[-limit:]} for app, found in lines.items()]


def _page(
    answers: Answers, arguments: Arguments, key: Callable[[Any], Any], after: Callable[[Any], str], is_last: bool
) -> object:
    rows: Any = side_by_side({number: page["items"] for number, page in answers.items()}, arguments)
    rows.sort(key=key, reverse=True)
    limit = int(arguments.get("limit", LIMIT))
    has_more = len(rows) > limit or any(page["after"] is not None for page in answers.values())
    items = rows[:limit]
    return {
        "items": items,
        "after": after(items[-1]) if items and has_more and not is_last else None,
        "total": sum(page["total"] for page in answers.values()),
    }


def _first(answers: Answers) -> Any:
    return next(iter(answers.values()))


MERGES: dict[str, Callable[[Answers, Arguments], object]] = {
    "server": server,
    "listeners": listeners,
    "hubs": side_by_side,
    "apps": apps,
    "journals": side_by_side,
    "pipelines": first,
    "limits": limits,
    "clusters": side_by_side,
    "peers": peers,
    "closed": newest,
    "log": newest,
    "traces": traces,
}
"""By the address below `/api/v1/`; others are answered by one worker."""


def metrics(texts: dict[int, str]) -> str:
    """Returns the metrics of all workers as one text, with the label `worker`.

    Args:
        texts: in the text format of Prometheus, by worker.
    """
    families: dict[str, list[str]] = {}
    for number, text in texts.items():
        family: list[str] = []
        is_known = False
        for line in text.split("\n"):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_known = name in families
                family = families.setdefault(name, [])
            if line and not line.startswith("#"):
                family.append(_labelled(line, number))
            elif line and not is_known:
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _labelled(line: str, worker: int) -> str:
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f'{name}{{worker="{worker}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'


log = logging.getLogger("smqrt.admin")

RESTART_S = 60.0
"""What an application may take to start again in a worker."""

Asked = tuple[Sequence[str], Arguments]
"""The words of an address below `/api/v1/`, and the arguments."""
Answered = tuple[int, Answer]
"""Status and answer."""


class Looks(NamedTuple):
    """What several addresses say.

    Attributes:
        answers: in the order in which they were asked for; None for what is not there, or belongs to a worker that does
            not answer.
        cost_s: of CPU that the worker needed that needed most.
    """

    answers: list[Any]
    cost_s: float


class Together:
    """A server with one worker or several.

    Args:
        parts: of this process.
        fleet: the workers; None when this process is alone.

    Attributes:
        parts: see above.
    """

    def __init__(self, parts: Parts, fleet: WorkerRpc | None = None) -> None:
        self.parts, self._fleet = parts, fleet

    def answer(self, words: Sequence[str], arguments: Arguments, body: Body | None = None) -> Answered:
        """Returns status and answer; blocks. Arguments and errors as `answers.answer`."""
        if body is not None:
            return self._act(words, body)
        found, _ = self._found([(words, arguments)])
        return self._together((words, arguments), found[0])

    def look(self, *words: str, **arguments: str) -> Any:
        """Returns what all workers, or the one that it is about, say at an address below `/api/v1/`. Raises
        ArgumentError."""
        try:
            status, answer = self.answer(words, arguments)
        except HttpError as error:
            raise ArgumentError(error.detail) from None
        if status != 200:
            raise ArgumentError(str(dict(answer)["error"]))  # type: ignore[call-overload]  # an error is a dict
        return answer

    def looks(self, asked: Sequence[Asked]) -> Looks:
        """Returns what several addresses say, with one question to each worker; blocks."""
        found, cost_s = self._found(asked)
        begun_s = thread_time()
        together = [self._shown(one, answers) for one, answers in zip(asked, found, strict=True)]
        return Looks(together, cost_s + thread_time() - begun_s)

    def metrics(self) -> Iterator[bytes]:
        """Yields the metrics of all in the text format of Prometheus."""
        lines = Metrics(self.parts).lines()
        if self._fleet is None:
            yield from lines
            return
        found = self._fleet.ask_all({"do": "metrics"})
        texts = {0: b"".join(lines).decode(), **{number: said["answer"] for number, said in found.items()}}
        yield metrics(texts).encode()

    def trace(self, hub: int | None, peer: str, topic: str) -> Events:
        """Yields what `tracing.begin` does, of the worker whose client it is, or of all. A hub that is named is meant
        with those of other workers that go on for the same one. Raises as `tracing.begin`."""
        if self._fleet is None:
            return topic_listener.begin(hub, peer, topic)
        number = _worker_of(["peers", peer], {}) if "." in peer else None
        key = None if hub is None else self.look("hubs", str(hub))["key"]
        question: Message = {"do": "trace", "key": key, "peer": peer, "topic": topic}
        if number in self._fleet.others:
            return self._fleet.events([number], question)
        own = _begun(question)
        return own if own and number is not None else self._fleet.events(self._fleet.others, question, own)

    def listen(self, hub: int, topics: Sequence[str | int]) -> Listener:
        """Subscribes to topics of a hub, whichever worker has it, until it is closed. Raises as `Listening`."""
        number = worker_of_hub(hub)
        if self._fleet is not None and number in self._fleet.others:
            return FarListening(self._fleet, number, hub, topics)
        return Listening(snapshots.broker_of(hub), topics)

    # ---- reading

    def _found(self, asked: Sequence[Asked]) -> tuple[list[dict[int, Answered]], float]:
        """What each worker that is concerned answers, by its number, for each that is asked; and `Looks.cost_s`."""
        found: list[dict[int, Answered]] = [{} for _ in asked]
        shares = {number: self._share(number, asked) for number in self._numbers}
        own, cost_s = _answered(self.parts, [asked[at] for at in shares[0]])
        said: dict[int, tuple[list[Answered], float]] = {0: (own, cost_s)}
        if self._fleet is not None:
            questions: dict[int, Message] = {
                number: {"do": "answers", "asked": [asked[at] for at in share]}
                for number, share in shares.items()
                if share and number
            }
            told = self._fleet.ask_each(questions)
            said |= {number: (one["answers"], one["cost_s"]) for number, one in told.items()}
        for number, (answered, _) in said.items():
            for at, (status, answer) in zip(shares[number], answered, strict=True):
                found[at][number] = status, answer
        return found, max(cost_s for _, cost_s in said.values())

    @property
    def _numbers(self) -> list[int]:
        return [0, *(self._fleet.others if self._fleet else [])]

    def _share(self, number: int, asked: Sequence[Asked]) -> list[int]:
        """The places of what is asked of a worker."""
        return [at for at, one in enumerate(asked) if self._concerns(number, *one)]

    def _concerns(self, number: int, words: Sequence[str], arguments: Arguments) -> bool:
        of = _worker_of(words, arguments)
        if of in self._numbers:
            return number == of
        return number == 0 or (of is None and _is_for_all(words))

    def _together(self, asked: Asked, found: dict[int, Answered]) -> Answered:
        words, arguments = asked
        of = _worker_of(words, arguments)
        if of in self._numbers and of not in found:
            raise HttpError(503, f"Worker {of} does not answer.", headers={"Retry-After": "1"})
        if self._fleet is None or of is not None or not _is_for_all(words):
            return next(iter(found.values()))
        if found[0][0] != 200:
            return found[0]
        given = {number: answer for number, (status, answer) in found.items() if status == 200}
        return 200, MERGES[words[0]](given, arguments)

    def _shown(self, asked: Asked, found: dict[int, Answered]) -> Any:
        try:
            status, answer = self._together(asked, found)
        except HttpError:
            return None
        return answer if status == 200 else None

    # ---- acting

    def _act(self, words: Sequence[str], body: Body) -> Answered:
        question: Message = {"do": "act", "words": words, "body": body}
        number = _worker_of(words, {})
        if self._fleet is not None and number in self._fleet.others:
            said = self._fleet.ask(number, question)
            if said is None:
                raise HttpError(503, f"Worker {number} does not answer.", headers={"Retry-After": "1"})
            return said["status"], said["answer"]
        own = answers.responded(lambda: answers.answer(self.parts, words, {}, body))
        if self._fleet is None or own[0] != 200 or number is not None:
            return own
        # One after the other: an application that starts again is not away everywhere at once.
        for number in self._fleet.others:
            said = self._fleet.ask(number, question, RESTART_S)
            if said is not None and said["status"] != 200:
                return said["status"], said["answer"]
        return own


def _worker_of(words: Sequence[str], arguments: Arguments) -> int | None:
    """The worker that an address is about; None when it is about all, or nothing."""
    match words:
        case ["hubs" | "peers", hub, *_]:
            number = hub.partition(".")[0]
        case ["peers"] | ["topics"]:
            number = arguments.get("hub", "")
        case _:
            number = ""
    return worker_of_hub(int(number)) if number.isascii() and number.isdigit() and len(number) < 18 else None


def _is_for_all(words: Sequence[str]) -> bool:
    """Whether the answers of all workers are merged; of others the first worker has the only one."""
    return len(words) == 1 and words[0] in MERGES


def _answered(parts: Parts, asked: Sequence[Asked]) -> tuple[list[Answered], float]:
    """What this process answers, and how many seconds of CPU that took."""
    begun_s = thread_time()
    give = answers.answer
    found = [answers.responded(partial(give, parts, words, arguments)) for words, arguments in asked]
    return found, thread_time() - begun_s


def answer_others(desk: WorkerRpcServer, parts: Parts) -> None:
    """Have a worker answer what another one, which has the admin listener, asks about it.

    Args:
        desk: of the worker.
        parts: of the worker.
    """

    def told(question: Message) -> Message:
        found, cost_s = _answered(parts, question["asked"])
        return {"do": "answers", "answers": found, "cost_s": cost_s}

    desk.answers["answers"] = told
    desk.answers["act"] = partial(_acted, parts)
    desk.answers["metrics"] = lambda question: {"do": "answer", "answer": b"".join(Metrics(parts).lines()).decode()}
    desk.news["trace"] = _traced
    desk.news[LISTEN] = partial(listened, snapshots.broker_of)


def _acted(parts: Parts, question: Message) -> Message:
    status, answer = answers.responded(partial(answers.answer, parts, question["words"], {}, question["body"]))
    return {"do": "answer", "status": status, "answer": answer}


def _traced(question: Message) -> News:
    try:
        for event in _begun(question) or ():
            yield {"do": "event", "answer": event}
    except SmqrtError as error:
        log.info("a trace for another worker: %s", error)
    yield END


def _begun(question: Message) -> Events | None:
    """The trace that is asked for; None when it is about a hub that this worker does not have."""
    key = question["key"]
    hub = next((one.number for one in all_brokers() if one.key == key), None)
    return None if key and hub is None else topic_listener.begin(hub, question["peer"], question["topic"])
