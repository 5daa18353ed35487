"""The certificate of a server, ordered and renewed in the background.

One process of a server orders, in a thread; every process gives the answers to challenges and reads the new files.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic, sleep, time

import gevent
from gevent.event import Event
from gevent.threadpool import ThreadPool

from smqrt.acme import orders as engine
from smqrt.acme.files import (
    HTTP_01,
    LOOK_S,
    TLS_ALPN_01,
    AcmeFiles,
    Answer,
    ChallengeAnswers,
    Contexts,
    State,
    disk_threads,
    new_key,
)
from smqrt.errors import AcmeError
from smqrt.transport.server_tls import shown

log = logging.getLogger("smqrt")

FIRST_RETRY_S, MAX_RETRY_S = 120.0, 12 * 3600.0
"""Let's Encrypt lets an account fail five times an hour for a name: waits that double stay below."""
MAX_ASKED_S = 8 * 86400.0
"""That an authority may ask to be left alone; the limits of Let's Encrypt are weeks."""
OTHER_ORDERS_S = 5.0
SHORTEST_S = 300.0
"""Between two orders that succeed, whatever the lifetime of the certificates."""
CLOCK_S = 600.0
"""So often the time of day is looked at: a machine that slept, or whose clock was set, renews in time."""
READ_S = 10.0
"""For the other processes of the server to read the answers. One that takes longer may answer too late."""
_SILENT_S = 2 * LOOK_S
"""The other process of a hot restart may be of a release that does not say what it has read: it has looked by then."""
GIVE_UP_S = engine.ORDER_S + 60.0


@dataclass(frozen=True)
class AcmePlan:
    """What is ordered, and where.

    Attributes:
        files: where it is kept, for which names, and of which authority.
        account: at that authority.
        challenge: the kind of the challenges; empty for `HTTP_01` where a port without TLS is open, else `TLS_ALPN_01`,
            and after a failure the other one.
    """

    files: AcmeFiles
    account: engine.Account
    challenge: str = ""

    @property
    def what(self) -> str:
        """The certificate, as lines of the log have it."""
        return f"certificate of {', '.join(self.files.names)}"


class AcmeService:
    """Orders, and answers to challenges.

    Args:
        plan: what is ordered.
        on_contexts: see `ChallengeAnswers`.
        reload: reads the certificates of the listeners again, and gives why it could not; blocks its greenlet.
        report: takes each line meant for the person at the terminal.
        has_http: whether a port without TLS is open.
        orders: whether this process orders; of several workers one does.

    Attributes:
        ordered, failed: how many orders of this process succeeded and failed.
    """

    def __init__(
        self,
        plan: AcmePlan,
        on_contexts: Callable[[Contexts], object],
        reload: Callable[[], str | None],
        report: Callable[[str], None],
        has_http: bool,
        orders: bool,
    ) -> None:
        self.plan = plan
        self.answers = ChallengeAnswers(plan.files, on_contexts)
        self._reload, self._report, self._has_http, self._orders = reload, report, has_http, orders
        self.ordered = self.failed = 0
        self._state = plan.files.state()
        self._due_s = plan.files.due_s()
        self._asked = Event()
        self._pool: ThreadPool | None = None
        self._worker: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Begin to answer, and to order when it is time."""
        self.answers.start()
        if self._orders:
            self._worker = gevent.spawn(self._order_for_ever)

    def stop(self) -> None:
        """Order nothing more."""
        self.answers.stop()
        if self._worker is not None:
            self._worker.kill(block=False)

    def try_now(self) -> None:
        """Do not wait longer after orders that failed."""
        if self._state.failures:
            self._asked.set()

    def snapshot(self) -> dict[str, object]:
        """Return what an operator asks, as JSON has it; times in Unix seconds."""
        return {
            "names": list(self.plan.files.names),
            "directory": self.plan.files.directory,
            "ordered": self.ordered,
            "failed": self.failed,
            "fault": self._state.fault or None,
            "next_s": self._next_s(),
        }

    def _next_s(self) -> float:
        return max(self._due_s, self._state.next_s)

    def _order_for_ever(self) -> None:
        with suppress(OSError):  # the first order says what is wrong with the folder
            disk_threads.call(self.plan.files.forget_answers)
        while True:
            wait_s = self._next_s() - time()
            if wait_s > 0 and not self._asked.wait(min(wait_s, CLOCK_S)):
                continue
            self._asked.clear()
            try:
                self._order()
            except Exception:
                log.exception("ordering the %s failed", self.plan.what)
                self._failed(AcmeError("an error of smqrt; the log has its traceback."))

    def _order(self) -> None:
        kind = self._kind()
        pool = self._pool = self._pool or ThreadPool(1)  # not gevent's own: an order may take minutes
        try:
            outcome = pool.spawn(_outcome, self.plan, kind).get(timeout=GIVE_UP_S)
            if isinstance(outcome, Exception):
                raise outcome
        except gevent.Timeout:
            self._pool = None  # that thread ends by itself
            self._failed(AcmeError(f"no end within {GIVE_UP_S:g} s. The next attempt comes by itself."), kind)
        except AcmeError as error:
            self._failed(error, kind)
        except OSError as error:
            self._failed(AcmeError(f"{error.filename}: {error.strerror}. Check tls.acme_folder."), kind)
        else:
            self._done(outcome, kind)

    def _kind(self) -> str:
        """That of the next challenges: after a failure the other one, unless the settings name one."""
        if self.plan.challenge:
            return self.plan.challenge
        first, other = (HTTP_01, TLS_ALPN_01) if self._has_http else (TLS_ALPN_01, HTTP_01)
        return other if self._has_http and self._state.failures % 2 else first

    def _done(self, is_new: bool | None, kind: str) -> None:
        if is_new is None:  # another process orders
            self._state = State(self._state.failures, time() + OTHER_ORDERS_S, self._state.fault, self._state.kind)
            return
        self._due_s = disk_threads.call(self.plan.files.due_s)
        self._state = State(next_s=time() + SHORTEST_S, kind=kind)
        self._keep()
        if fault := self._reload():
            log.error("%s: ordered by ACME, and cannot be used: %s", self.plan.what, fault)
        if is_new:
            self.ordered += 1
            ends = shown(datetime.fromtimestamp(self._next_s(), UTC))
            self._report(f"{self.plan.what}: ordered by ACME ({kind}); the next one from {ends} on")

    def _failed(self, error: AcmeError, kind: str = "") -> None:
        failures = self._state.failures + 1
        wait_s = min(FIRST_RETRY_S * 2 ** min(failures - 1, 20), MAX_RETRY_S) * random.uniform(1, 1.25)
        wait_s = max(wait_s, min(error.retry_after_s, MAX_ASKED_S))
        self._state = State(failures, time() + wait_s, str(error), kind)
        self._keep()
        self.failed += 1
        again = shown(datetime.fromtimestamp(self._state.next_s, UTC))
        log.error("%s: not ordered by ACME: %s The next attempt is at %s, or at SIGHUP.", self.plan.what, error, again)

    def _keep(self) -> None:
        try:
            disk_threads.call(self.plan.files.keep, self._state)
        except OSError as error:
            log.error("cannot keep the state of ACME: %s", error)


def _outcome(plan: AcmePlan, kind: str) -> bool | Exception | None:
    """Return what `_ordered` gives or raises: gevent writes errors of its threads to the terminal."""
    try:
        return _ordered(plan, kind)
    except Exception as error:
        return error


def _ordered(plan: AcmePlan, kind: str) -> bool | None:
    """Order in this thread: true, false when another process has done it meanwhile, None when one is doing it."""
    files = plan.files
    with files.locked() as is_alone:
        if not is_alone:
            return None
        if files.due_s() > time():
            return False
        key = new_key()
        files.store(engine.order(plan.account, files.names, kind, key, lambda answers: _publish(files, answers)), key)
        return True


def _publish(files: AcmeFiles, answers: Sequence[Answer]) -> None:
    """Publish answers; returns when all processes of the server give them, since the authority may ask any of them."""
    files.publish(answers)
    if not answers:
        return
    version, began_s = files.version(), monotonic()
    sleep(_SILENT_S)
    while not files.all_have_read(version) and monotonic() - began_s < READ_S:
        sleep(0.02)
