"""Responses with small static files, sent again without parsing when a request is repeated (help: http).

Browsers and programs send equal heads again and again. For a known head, the server skips the parser and the search in
the tree. It keeps only responses that depend on the head, the file and the tree, but on no function, login or client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from smqrt.http.access import Access
from smqrt.http.message import Request

MAX_KEPT = 1024
"""Heads of one server. The oldest is removed first."""
MAX_HEAD_BYTES = 2048
MAX_BODY_BYTES = 16 << 10
MAX_FILE_BYTES = 32 << 10
"""In memory, as it is and compressed. Kept responses keep files in memory that the reader has dropped."""
_CHALLENGES = "/.well-known/"  # paths that a certificate authority requests; their responses are not files


class SentFile(Protocol):
    """A file as it was sent.

    Attributes:
        head: the response head, without `Date` and the empty line.
        body: the body.
    """

    head: bytes
    body: bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that the whole file takes in memory."""

    def is_current(self) -> bool:
        """Whether the file and the header fields of its reader are the same; takes one system call."""


@dataclass(slots=True)
class _Kept:
    file: SentFile
    access: Access
    tree_version: int
    is_https: bool
    turn: int = -1  # of the last check of the file, and the value of `other_responses` then
    other_responses: int = 0


class Repeats:
    """The kept responses of one server.

    Attributes:
        by_head: the responses by request head.
        other_responses: counts what handlers have sent. A client that has received it must find the files as they were
            when it was sent, so a file is checked again after it, also in the same turn.
    """

    def __init__(self) -> None:
        self.by_head: dict[bytes, _Kept] = {}
        self.other_responses = 0
        self._valid_for: tuple[Access | None, int] = None, 0

    def find(self, head: bytes, access: Access, tree_version: int, is_https: bool, turn: int) -> SentFile | None:
        """Return the file for a request head in `by_head`, if nothing has changed; otherwise None.

        Args:
            head: the whole head of the request.
            access: the checks of the server.
            tree_version: see `tree.Root.version`.
            is_https: whether the connection is encrypted.
            turn: number of the loop's turn. Requests that arrive in one turn share the check of a file.
        """
        kept = self.by_head[head]
        if kept.is_https is not is_https:
            return None
        if kept.tree_version == tree_version and kept.access is access:
            if kept.turn == turn and kept.other_responses == self.other_responses:
                return kept.file
            if kept.file.is_current():
                kept.turn, kept.other_responses = turn, self.other_responses
                return kept.file
        del self.by_head[head]
        return None

    def keep(self, head: bytes, request: Request, access: Access, tree_version: int, is_https: bool) -> None:
        """Keep the response to a request, unless it depends on more than `find` compares."""
        file, response = request.sent_file, request.response
        if (
            file is None
            or len(head) > MAX_HEAD_BYTES
            or len(file.body) > MAX_BODY_BYTES
            or file.kept_bytes > MAX_FILE_BYTES
            or request.method != "GET"
            or request.version != "1.1"
            or request.content_length != 0
            or request.expects_continue
            or response.close
            or response.finishers
            or response.before_send is not None
            or request.path.startswith(_CHALLENGES)
            or not access.accepts_everywhere(request.host)
        ):
            return
        if (access, tree_version) != self._valid_for:  # all others are invalid, and may keep an unloaded application
            self._valid_for = access, tree_version
            self.by_head.clear()
        if len(self.by_head) >= MAX_KEPT:
            del self.by_head[next(iter(self.by_head))]
        self.by_head[head] = _Kept(file, access, tree_version, is_https)
