"""A client that goes where servers send it, keeps their cookies and proves its password to those that ask."""

from __future__ import annotations

from dataclasses import replace

from smqrt.http.client import digest
from smqrt.http.client.conversation import Conversation, Options
from smqrt.http.client.cookies import Jar
from smqrt.http.client.digest import Challenge
from smqrt.http.client.request import Request
from smqrt.http.client.url import Url

MAX_REDIRECTS = 9
MAX_CHALLENGES = 100  # of as many servers; they ask again when they were forgotten
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_DRAIN_BYTES = 65536  # a longer body of a redirect is not waited for


class Follower(Conversation):
    """A `Conversation` that follows up to nine redirects, and answers one challenge (Digest), as far as it need not
    send a body again. What it learned is used for the requests that follow.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._jar = Jar()
        self._asked: Request | None = None
        self._redirects = 0
        self._challenges: dict[tuple[bool, str, int], Challenge] = {}
        self._proved = False

    def ask(self, request: Request) -> None:
        """See `Conversation.ask`."""
        self._redirects = 0
        self._proved = False
        self._ask(request)

    def _ask(self, request: Request) -> None:
        self._asked = request
        own = {name.lower() for name, _ in request.headers}
        more = [("Cookie", self._jar.value(request.url)), ("Authorization", self._proof(request))]
        headers = [(name, value) for name, value in more if value and name.lower() not in own]
        super().ask(replace(request, headers=[*request.headers, *headers]))

    def _proof(self, request: Request) -> str:
        challenge = self._challenges.get(request.url.origin)
        user, password = request.login
        if challenge is None or user is None:
            return ""
        return challenge.answer(request.method, request.url.target, user, password or "")

    def status(self) -> int:
        """See `Conversation.status`; the one behind the last redirect."""
        while True:
            answered = self._response.status is not None
            status = super().status()
            if answered or self._asked is None:
                return status
            self._jar.keep(self._asked.url, self.headers)
            following = self._challenged() if status == 401 else self._following(status)
            if following is None:
                return status
            self.skip(_DRAIN_BYTES)
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
        self._redirects += 1
        self._proved = False
        url = self._asked.url.join(location.encode("latin-1").decode("utf-8", "replace"))
        return self._asked.redirected(status, url)

    def _challenged(self) -> Request | None:
        """The same request again, when the server asked for a proof that can be given and was not."""
        assert self._asked is not None
        challenge = digest.find([value for name, value in self.headers if name.lower() == "www-authenticate"])
        if challenge is None or self._asked.login[0] is None:
            return None
        had = self._challenges.get(self._asked.url.origin)
        self._remember(challenge)
        if self._proved or (had is not None and not challenge.stale) or self._asked.length != 0:
            return None
        self._proved = True
        return self._asked

    def _remember(self, challenge: Challenge) -> None:
        assert self._asked is not None
        if len(self._challenges) >= MAX_CHALLENGES:
            self._challenges.clear()
        self._challenges[self._asked.url.origin] = challenge
