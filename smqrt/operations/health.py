"""Health of a server: whether it lives, and whether it should be sent clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

PHASES = ("loading", "serving", "draining")
"""Where a server stands in its life."""


class Loaded(Protocol):
    """An application, as far as its health is concerned."""

    @property
    def uri(self) -> str: ...
    @property
    def error(self) -> str | None: ...


class Health:
    """What `/readyz` answers.

    Args:
        phase: gives one of `PHASES`.
        applications: gives those of the server.
        strict: an application that failed makes the server unready.

    Attributes:
        strict: see above.
        drained: an operator has sent its clients to other servers.
    """

    def __init__(
        self, phase: Callable[[], str], applications: Callable[[], Iterable[Loaded]] = tuple, strict: bool = False
    ) -> None:
        self.strict = strict
        self.drained = False
        self._phase, self._applications = phase, applications

    @property
    def phase(self) -> str:
        """One of `PHASES`."""
        return self._phase()

    def obstacles(self) -> list[str]:
        """Returns why the server should get no clients now, a sentence each; none when it should."""
        if self.phase == "loading":
            return ["The applications are being loaded."]
        if self.phase == "draining":
            return ["The server is ending; connections are being closed."]
        if self.drained:
            return ["The server is drained and takes no SMQ clients, until `smqrt cluster drain --undo`."]
        if not self.strict:
            return []
        failed = [one for one in self._applications() if one.error is not None]
        return [f"The application {one.uri} failed; its error is at /api/v1/apps." for one in failed]
