"""Routes that are more than a topic: through the onpublish hook, and to nobody.

A client's route cache holds the topic itself when no hook is set, so that hooks cost the data path nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smqrt.broker.hooks import Pending
from smqrt.broker.stats import Drop
from smqrt.broker.topics import Route
from smqrt.wire.smq import count_frames

if TYPE_CHECKING:
    from smqrt.broker.hub import Hub


class Guarded:
    """A route through `onpublish`, called once per run before routing. Where the run goes is decided behind the hook,
    since subscribers may have come or gone meanwhile.
    """

    __slots__ = ("_hub", "_peer", "_ptid", "_tid")

    def __init__(self, hub: Hub, tid: int, ptid: int, peer: Any) -> None:
        self._hub, self._tid, self._ptid, self._peer = hub, tid, ptid, peer

    def deliver(self, run: bytes) -> bool:
        """Deliver what the hook lets pass; true when the hook waits."""
        hook = self._hub.hooks.onpublish
        answer: Any = hook(run, self._tid, self._ptid, self._peer) if hook else run
        if not isinstance(answer, Pending):
            self._pass(run, answer or b"")
            return False
        answer.then(lambda allowed, error: self._pass(run, allowed or b""))
        if answer.done:
            return False
        answer.then(lambda allowed, error: self._peer.outbox.resume())
        return True

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))

    def _pass(self, run: bytes, allowed: bytes) -> None:
        if len(allowed) < len(run):
            self._hub.stats.drop(Drop.SWALLOWED, count_frames(run) - count_frames(allowed))
        if allowed:
            topic = self._hub.topics.get(self._tid)
            found = topic and topic.subscribers
            route: Route = topic if topic and found else Unrouted(self._hub, self._tid, self._ptid, self._peer)
            route.deliver(allowed)


class Unrouted:
    """The route of messages that nobody receives: they are counted and shown to `ondrop`."""

    __slots__ = ("_hub", "_peer", "_ptid", "_tid")

    def __init__(self, hub: Hub, tid: int, ptid: int, peer: Any) -> None:
        self._hub, self._tid, self._ptid, self._peer = hub, tid, ptid, peer

    def deliver(self, run: bytes) -> None:
        """Count the run as dropped."""
        self._hub.stats.drop(Drop.UNROUTED, count_frames(run))
        hook = self._hub.hooks.ondrop
        if hook:
            hook(run, self._tid, self._ptid, self._peer)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))
