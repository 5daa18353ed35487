"""A client that goes where servers send it, and keeps their cookies."""

from __future__ import annotations

from dataclasses import replace

from smqrt.errors import StreamError
from smqrt.http.client.conversation import Conversation, Options
from smqrt.http.client.cookies import Jar
from smqrt.http.client.request import Request
from smqrt.http.client.url import Url

MAX_REDIRECTS = 9
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_DRAIN_BYTES = 65536  # a longer body of a redirect is not waited for


class Follower(Conversation):
    """A `Conversation` that follows up to nine redirects, as far as it need not send a body again."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._jar = Jar()
        self._asked: Request | None = None
        self._redirects = 0

    def ask(self, request: Request) -> None:
        """See `Conversation.ask`."""
        self._redirects = 0
        self._ask(request)

    def _ask(self, request: Request) -> None:
        self._asked = request
        cookies = self._jar.value(request.url)
        if cookies and not any(name.lower() == "cookie" for name, _ in request.headers):
            request = replace(request, headers=[*request.headers, ("Cookie", cookies)])
        super().ask(request)

    def status(self) -> int:
        """See `Conversation.status`; the one behind the last redirect."""
        while True:
            answered = self._response.status is not None
            status = super().status()
            if answered or self._asked is None:
                return status
            self._jar.keep(self._asked.url, self.headers)
            following = self._following(status)
            if following is None:
                return status
            self._redirects += 1
            self._drain()
            self._ask(following)

    @property
    def url(self) -> Url | None:
        """Where the last request went."""
        return self._asked.url if self._asked else None

    def _following(self, status: int) -> Request | None:
        location = self.get("location")
        if status not in _REDIRECTS or location is None or self._redirects >= MAX_REDIRECTS:
            return None
        assert self._asked is not None
        url = self._asked.url.join(location.encode("latin-1").decode("utf-8", "replace"))
        return self._asked.redirected(status, url)

    def _drain(self) -> None:
        left = _DRAIN_BYTES
        try:
            while left > 0 and (data := Conversation.read(self)):
                left -= len(data)
        except StreamError:
            self.close()  # the next request makes a new connection
