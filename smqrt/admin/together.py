"""Answers for operators of all workers of a server, as if it were one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from smqrt.admin import answers, merging, tracing
from smqrt.admin.answers import Answer, Body
from smqrt.admin.api_arguments import Arguments
from smqrt.admin.metrics import Metrics
from smqrt.admin.parts import Parts
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.http.status import HttpError
from smqrt.net.fd_channel import Message
from smqrt.net.fleet import END, Desk, Events, Fleet, News
from smqrt.net.worker_place import worker_of_hub

log = logging.getLogger("smqrt.admin")

RESTART_S = 60.0
"""What an application may take to start again in a worker."""


class Together:
    """A server with one worker or several.

    Args:
        parts: of this process.
        fleet: the other workers; None when this process is alone.

    Attributes:
        parts: see above.
    """

    def __init__(self, parts: Parts, fleet: Fleet | None = None) -> None:
        self.parts, self._fleet = parts, fleet

    def answer(self, words: list[str], arguments: Arguments, body: Body | None = None) -> tuple[int, Answer]:
        """Returns status and answer; blocks. Arguments and errors as `answers.answer`."""
        own = answers.responded(lambda: answers.answer(self.parts, words, arguments, body))
        if self._fleet is None:
            return own
        question: Message = {"do": "answer", "words": words, "arguments": arguments, "body": body}
        if (number := _worker_of(words, arguments)) is not None:
            return own if number not in self._fleet.others else self._answer_of(number, question)
        if own[0] != 200:
            return own
        if body is not None:
            return self._answer_of_each(own, question)
        if len(words) == 1 and words[0] in merging.MERGES:
            return 200, self._merged(words[0], arguments, own[1], question)
        return own

    def look(self, *words: str, **arguments: str) -> Any:
        """Returns what all workers, or the one that it is about, say at an address below `/api/v1/`. Raises
        ArgumentError."""
        try:
            status, answer = self.answer(list(words), arguments)
        except HttpError as error:
            raise ArgumentError(error.detail) from None
        if status != 200:
            raise ArgumentError(str(dict(answer)["error"]))  # type: ignore[call-overload]  # an error is a dict
        return answer

    def metrics(self) -> Iterator[bytes]:
        """Yields the metrics of all in the text format of Prometheus."""
        lines = Metrics(self.parts).lines()
        if self._fleet is None:
            yield from lines
            return
        found = self._fleet.ask_all({"do": "metrics"})
        texts = {0: b"".join(lines).decode(), **{number: said["answer"] for number, said in found.items()}}
        yield merging.metrics(texts).encode()

    def trace(self, hub: int | None, peer: str, topic: str) -> Events:
        """Yields what `tracing.begin` does, of the worker whose hub it is, or of all. Raises as that."""
        if self._fleet is None:
            return tracing.begin(hub, peer, topic)
        words, arguments = (["peers", peer], {}) if "." in peer else (["topics"], {"hub": str(hub)} if hub else {})
        number = _worker_of(words, arguments)
        question: Message = {"do": "trace", "hub": hub, "peer": peer, "topic": topic}
        if number in self._fleet.others:
            return self._fleet.events([number], question)
        own = tracing.begin(hub, peer, topic)
        return own if number is not None else self._fleet.events(self._fleet.others, question, own)

    def _answer_of(self, number: int, question: Message) -> tuple[int, Answer]:
        said = self._fleet.ask(number, question) if self._fleet else None
        if said is None:
            raise HttpError(503, f"Worker {number} does not answer.", headers={"Retry-After": "1"})
        return said["status"], said["answer"]

    def _answer_of_each(self, own: tuple[int, Answer], question: Message) -> tuple[int, Answer]:
        """One after the other: an application that starts again is not away everywhere at once."""
        assert self._fleet
        for number in self._fleet.others:
            said = self._fleet.ask(number, question, RESTART_S)
            if said is not None and said["status"] != 200:
                return said["status"], said["answer"]
        return own

    def _merged(self, name: str, arguments: Arguments, own: Answer, question: Message) -> Answer:
        assert self._fleet
        found = {} if merging.MERGES[name] is merging.first else self._fleet.ask_all(question)
        all_of_them = {0: own, **{number: one["answer"] for number, one in found.items() if one["status"] == 200}}
        return merging.MERGES[name](all_of_them, arguments)


def _worker_of(words: list[str], arguments: Arguments) -> int | None:
    """The worker that an address is about; None when it is about all, or nothing."""
    match words:
        case ["hubs" | "peers", hub, *_]:
            number = hub.partition(".")[0]
        case _:
            number = arguments.get("hub", "") if words in (["peers"], ["topics"]) else ""
    return worker_of_hub(int(number)) if number.isascii() and number.isdigit() and len(number) < 18 else None


def answer_others(desk: Desk, parts: Parts) -> None:
    """Have a worker answer what another one, which has the admin listener, asks about it.

    Args:
        desk: of the worker.
        parts: of the worker.
    """
    desk.answers["answer"] = partial(_replied, parts)
    desk.answers["metrics"] = lambda question: {"do": "answer", "answer": b"".join(Metrics(parts).lines()).decode()}
    desk.news["trace"] = _traced


def _traced(question: Message) -> News:
    try:
        for event in tracing.begin(question["hub"], question["peer"], question["topic"]):
            yield {"do": "event", "answer": event}
    except SmqrtError as error:
        log.info("a trace for another worker: %s", error)
    yield END


def _replied(parts: Parts, question: Message) -> Message:
    give = answers.answer
    try:
        status, answer = answers.responded(
            lambda: give(parts, question["words"], question["arguments"], question["body"])
        )
    except HttpError as error:
        status, answer = error.status, {"error": error.detail}
    return {"do": "answer", "status": status, "answer": answer}
