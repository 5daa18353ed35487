"""Routes that are more than a topic: through the onpublish hook, into the journal, and to nobody.

A client's route cache holds the topic itself when no hook is set and nothing is recorded, so that neither costs the
data path anything then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from smqrt.broker.hooks import Pending
from smqrt.broker.outbox import Outbox
from smqrt.broker.stats import Drop
from smqrt.broker.topics import Route, Topic
from smqrt.wire.smq import count_frames

if TYPE_CHECKING:
    from smqrt.broker.hub import Hub
    from smqrt.broker.server_client import ServerClient

log = logging.getLogger("smqrt")


class Recorder(Protocol):
    """Keeps what is published: the broker's side of a journal.

    Attributes:
        full: it can take no more for now; publishers have to wait.
    """

    full: bool

    def selects(self, topic: Topic | None) -> bool:
        """Whether messages to `topic` are recorded; None is a number that belongs to nobody."""
        ...

    def record(self, run: bytes) -> None:
        """Keep a run, in the order of the calls."""
        ...

    def record_large(self, run: bytes) -> None:
        """As `record`, for runs of many kilobytes."""
        ...

    def record_unrouted(self, run: bytes) -> None:
        """Keep a run that nobody receives."""
        ...

    def record_assembled(self, deliver: Callable[[bytes], bool | None], run: bytes) -> bool:
        """Call `deliver(run)`; what it records was assembled from PubFrag packets."""
        ...

    def skipped(self, run: bytes) -> None:
        """Count the messages of a run that was not selected."""
        ...

    def hold(self, publisher: Any) -> bool:
        """Let the outbox of `publisher` resume once there is room again; gives true."""
        ...

    @property
    def waits_for_disk(self) -> bool:
        """Nobody receives a message before the disk has it: `send_later` delivers what is recorded."""

    def send_later(self, deliver: Callable[[bytes], bool | None], run: bytes, publisher: Any) -> bool:
        """Deliver a run when the disk has it, and let the outbox of `publisher` resume then; gives whether it waits."""
        ...

    def left(self, client: Any) -> None:
        """A client is gone; what it published is still to be written with its name."""
        ...


def destination(hub: Hub, tid: int, ptid: int, peer: Any) -> Route:
    """Where messages of `peer` to `tid` go now, the hook left aside."""
    topic = hub.topics.get(tid)
    if topic:
        topic.settle()
    route: Route = topic if topic and topic.subscribers else Unrouted(hub, tid, ptid, peer)
    server = hub.server
    if topic is not None and (topic is server.topic or topic.id in server.topics) and peer is not server:
        route = Handled(server, route, peer)
    recorder = hub.recorder
    if recorder is None:
        return route
    if not recorder.selects(topic):
        return Skipped(recorder, route)
    return (Kept if recorder.waits_for_disk else Recorded)(recorder, route, peer)


class Handled:
    """A route on which handlers of the server listen: publishers wait while these are behind."""

    __slots__ = ("_deliver", "_deliver_view", "_peer", "_server", "route")

    def __init__(self, server: ServerClient, route: Route, peer: Any) -> None:
        self._server, self._peer, self.route = server, peer, route
        self._deliver, self._deliver_view = route.deliver, route.deliver_view

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run; true when the publisher has to wait."""
        return self._deliver(run) or (self._server.behind and self._server.hold(self._peer))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self._deliver_view(view) or (self._server.behind and self._server.hold(self._peer))


class Recorded:
    """A route that is written to the journal before anybody receives from it."""

    __slots__ = ("_deliver", "_peer", "_record", "_record_large", "_recorder", "_route")

    def __init__(self, recorder: Recorder, route: Route, peer: Any) -> None:
        self._recorder, self._route, self._peer = recorder, route, peer
        self._deliver = route.deliver
        self._record, self._record_large = recorder.record, recorder.record_large
        if isinstance(route, Unrouted):
            self._record = self._record_large = recorder.record_unrouted

    @property
    def sole_raw(self) -> Outbox | None:
        """See `Topic.sole_raw`; while the recorder is full, publishers must come through here."""
        return None if self._recorder.full else getattr(self._route, "sole_raw", None)

    def deliver(self, run: bytes) -> bool | None:
        """Record the run, then deliver it; true when the publisher has to wait for the journal."""
        self._record(run)
        return self._deliver(run) or (self._recorder.full and self._recorder.hold(self._peer))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        self._record_large(bytes(view))
        return self._route.deliver_view(view) or (self._recorder.full and self._recorder.hold(self._peer))


class Kept(Recorded):
    """A route that is on the disk before anybody receives from it."""

    __slots__ = ()

    @property
    def sole_raw(self) -> Outbox | None:
        """None: nothing goes past `deliver`."""
        return None

    def deliver(self, run: bytes) -> bool:
        """Record the run, and deliver it later; true when the publisher has to wait for that."""
        self._record(run)
        return self._recorder.send_later(self._deliver, run, self._peer)

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))


class Skipped:
    """A route that the journal does not want: its messages are counted."""

    __slots__ = ("_recorder", "_route")

    def __init__(self, recorder: Recorder, route: Route) -> None:
        self._recorder, self._route = recorder, route

    def deliver(self, run: bytes) -> bool | None:
        """Count the run, then deliver it."""
        self._recorder.skipped(run)
        return self._route.deliver(run)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        self._recorder.skipped(bytes(view))
        return self._route.deliver_view(view)


class Guarded:
    """A route through `onpublish`, called once per run before routing. Where the run goes is decided behind the hook,
    since subscribers may have come or gone meanwhile.
    """

    __slots__ = ("_hub", "_peer", "_ptid", "_tid")

    def __init__(self, hub: Hub, tid: int, ptid: int, peer: Any) -> None:
        self._hub, self._tid, self._ptid, self._peer = hub, tid, ptid, peer

    def deliver(self, run: bytes) -> bool:
        """Deliver what the hook lets pass; true when the hook or the journal waits."""
        hook = self._hub.hooks.onpublish
        answer: Any = hook(run, self._tid, self._ptid, self._peer) if hook else run
        if not isinstance(answer, Pending):
            return self._pass(run, answer)
        if answer.done:
            return self._pass(run, None if answer.failed else answer.result())
        answer.then(lambda allowed, error: self._answered(run, allowed))
        return True

    def _answered(self, run: bytes, allowed: bytes | None) -> None:
        try:
            waits = self._pass(run, allowed)
        except Exception:  # the publisher must not wait for ever
            log.exception("error while a message was routed; it is lost")
            waits = False
        if not waits:
            self._peer.outbox.resume()

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))

    def _pass(self, run: bytes, allowed: bytes | None) -> bool:
        allowed = allowed or b""
        if len(allowed) < len(run):
            self._hub.stats.drop(Drop.SWALLOWED, count_frames(run) - count_frames(allowed))
        return bool(allowed and destination(self._hub, self._tid, self._ptid, self._peer).deliver(allowed))


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
