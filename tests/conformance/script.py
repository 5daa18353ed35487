"""Reads and plays the `*.smq` files; README.md describes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.device import KINDS, Device, connect_packet

_TOKEN = re.compile(
    r'(?:"(?P<text>(?:[^"\\]|\\.)*)"|\{(?P<name>[^}?]+)(?P<new>\??)\}|(?P<hex>(?:[0-9a-f]{2})+))'
    r"(?:\*(?P<count>\d+))?"
)


@dataclass
class Case:
    """One case: its name, the transports it is for, its lines."""

    name: str
    kinds: tuple[str, ...] = KINDS
    lines: list[str] = field(default_factory=list)


def read(path: Path) -> list[Case]:
    """The cases of a file."""
    cases: list[Case] = []
    for line in path.read_text().splitlines():
        if line.startswith("== "):
            cases.append(Case(line[3:]))
        elif line.startswith("kinds "):
            cases[-1].kinds = tuple(line.split()[1:])
        elif line and not line.startswith("#"):
            cases[-1].lines.append(line)
    return cases


class Player:
    """Plays cases.

    Args:
        open_device: gives a fresh connection.
        ids: the names that stand for ids.
    """

    def __init__(self, open_device: Callable[[], Device], ids: dict[str, int]) -> None:
        self._open = open_device
        self._ids = {name: number.to_bytes(4, "big") for name, number in ids.items()}
        self._devices: dict[str, Device] = {}

    def play(self, case: Case) -> None:
        for line in case.lines:
            try:
                self._step(line[0], line[1], line[2:].strip())
            except AssertionError as error:
                raise AssertionError(f"{case.name}: {line}: {error}") from error

    def _step(self, who: str, what: str, rest: str) -> None:
        if what in "+*":
            self._devices[who] = self._open().start()
        device = self._devices[who]
        match what:
            case "+":
                device.send(connect_packet(self.bytes(rest))).accepted()
                self._ids[who] = device.etid.to_bytes(4, "big")
            case ">":
                device.send(*(self.bytes(packet) for packet in rest.split(" / ")))
            case "~":
                device.send_bytes(self.bytes(rest))
            case "<":
                self._compare(rest, device.receive())
            case ".":
                device.expect_nothing()
            case "!":
                device.expect_end()
            case "-":
                device.close()

    def bytes(self, text: str) -> bytes:
        """The bytes that a line describes."""
        return b"".join(self._value(token) for token in self._tokens(text))

    def _tokens(self, text: str) -> list[re.Match[str]]:
        tokens = list(_TOKEN.finditer(text))
        left_over = _TOKEN.sub("", text).strip()
        assert not left_over, f"cannot read {left_over!r}"
        return tokens

    def _value(self, token: re.Match[str]) -> bytes:
        if token["name"]:
            value = self._ids[token["name"]]
        elif token["hex"]:
            value = bytes.fromhex(token["hex"])
        else:
            value = bytes(ast.literal_eval(f'b"{token["text"]}"'))
        return value * int(token["count"] or 1)

    def _compare(self, text: str, got: bytes) -> None:
        at = 0
        for token in self._tokens(text):
            if token["new"]:
                self._ids[token["name"]] = got[at : at + 4]
            value = self._value(token)
            assert got[at : at + len(value)] == value, f"got {got[:100]!r}"
            at += len(value)
        assert at == len(got), f"got {got[:100]!r}, which is longer"
