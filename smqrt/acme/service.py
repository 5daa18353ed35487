"""Background service that orders and renews a server's certificate.

One process of the server orders, in a thread. Every process answers challenges and reads the new files.
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

from smqrt.acme import orders
from smqrt.acme.files import (
    HTTP_01,
    POLL_S,
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
"""Let's Encrypt allows five failures per account, name and hour: delays that double stay below."""
MAX_RETRY_AFTER_S = 8 * 86400.0
"""The longest Retry-After of an authority that is followed; Let's Encrypt limits orders per week."""
OTHER_ORDERS_S = 5.0
"""Delay after finding that another process orders."""
MIN_INTERVAL_S = 300.0
"""Between two orders that succeed, whatever the lifetime of the certificates."""
MAX_SLEEP_S = 600.0
"""Interval at which the clock is read: after a suspend or a clock change, renewal is still in time."""
READ_S = 10.0
"""How long to wait until the other processes of the server have read the answers."""
_MIN_PUBLISH_S = 2 * POLL_S
"""Older releases do not record what they have read. In a hot restart such a process has polled after this time."""
MAX_ORDER_S = orders.ORDER_S + 60.0
"""After this time a thread that orders is abandoned."""


@dataclass(frozen=True)
class AcmePlan:
    """Which certificate to order, and where.

    Attributes:
        files: its files, names and authority.
        account: the account at that authority.
        challenge: the kind of the challenges. Empty: `HTTP_01` when a port without TLS is open, otherwise
            `TLS_ALPN_01`; after a failure the other one when a port without TLS is open.
    """

    files: AcmeFiles
    account: orders.Account
    challenge: str = ""

    @property
    def what(self) -> str:
        """The certificate, for log lines."""
        return f"certificate of {', '.join(self.files.names)}"


class AcmeService:
    """Orders certificates and answers challenges.

    Args:
        plan: what to order.
        on_contexts: see `ChallengeAnswers`.
        reload: reloads the certificates of the listeners and returns the fault, if any; blocks its greenlet.
        report: prints a line on the terminal.
        has_http: whether a port without TLS is open.
        orders: whether this process orders; one of several workers does.

    Attributes:
        ordered, failed: number of orders of this process that succeeded and failed.
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
        self._retry_now = Event()
        self._pool: ThreadPool | None = None
        self._worker: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Start to answer challenges, and to order when the certificate is due."""
        self.answers.start()
        if self._orders:
            self._worker = gevent.spawn(self._run)

    def stop(self) -> None:
        """Stop ordering and polling."""
        self.answers.stop()
        if self._worker is not None:
            self._worker.kill(block=False)

    def try_now(self) -> None:
        """After a failed order, try again without further delay."""
        if self._state.failures:
            self._retry_now.set()

    def snapshot(self) -> dict[str, object]:
        """Return the state for the operations API, as JSON values; times in Unix seconds."""
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

    def _run(self) -> None:
        with suppress(OSError):  # the first order reports a fault of the folder
            disk_threads.call(self.plan.files.forget_answers)
        while True:
            wait_s = self._next_s() - time()
            if wait_s > 0 and not self._retry_now.wait(min(wait_s, MAX_SLEEP_S)):
                continue
            self._retry_now.clear()
            try:
                self._order()
            except Exception:
                log.exception("ordering the %s failed", self.plan.what)
                self._failed(AcmeError("internal error; the log has its traceback."))

    def _order(self) -> None:
        kind = self.plan.challenge
        if not kind:  # after a failure the other kind
            first, other = (HTTP_01, TLS_ALPN_01) if self._has_http else (TLS_ALPN_01, HTTP_01)
            kind = other if self._has_http and self._state.failures % 2 else first
        pool = self._pool = self._pool or ThreadPool(1)  # not gevent's own: an order may take minutes
        try:
            outcome = pool.spawn(_order_in_thread, self.plan, kind).get(timeout=MAX_ORDER_S)
            if isinstance(outcome, Exception):
                raise outcome
        except gevent.Timeout:
            self._pool = None  # the abandoned thread ends some day
            self._failed(AcmeError(f"no result within {MAX_ORDER_S:g} s. smqrt tries again automatically."), kind)
        except AcmeError as error:
            self._failed(error, kind)
        except OSError as error:
            self._failed(AcmeError(f"{error.filename}: {error.strerror}. Check tls.acme_folder."), kind)
        else:
            self._succeeded(outcome, kind)

    def _succeeded(self, is_new: bool | None, kind: str) -> None:
        if is_new is None:  # another process is ordering
            self._state = State(self._state.failures, time() + OTHER_ORDERS_S, self._state.fault, self._state.kind)
            return
        self._due_s = disk_threads.call(self.plan.files.due_s)
        self._state = State(next_s=time() + MIN_INTERVAL_S, kind=kind)
        self._keep()
        if fault := self._reload():
            log.error("%s: ordered by ACME, but not usable: %s", self.plan.what, fault)
        if is_new:
            self.ordered += 1
            due = shown(datetime.fromtimestamp(self._next_s(), UTC))
            self._report(f"{self.plan.what}: ordered by ACME ({kind}); renewal due at {due}")

    def _failed(self, error: AcmeError, kind: str = "") -> None:
        failures = self._state.failures + 1
        wait_s = min(FIRST_RETRY_S * 2 ** min(failures - 1, 20), MAX_RETRY_S) * random.uniform(1, 1.25)
        wait_s = max(wait_s, min(error.retry_after_s, MAX_RETRY_AFTER_S))
        self._state = State(failures, time() + wait_s, str(error), kind)
        self._keep()
        self.failed += 1
        next_attempt = shown(datetime.fromtimestamp(self._state.next_s, UTC))
        log.error("%s: ACME order failed: %s Next attempt: %s, or on SIGHUP.", self.plan.what, error, next_attempt)

    def _keep(self) -> None:
        try:
            disk_threads.call(self.plan.files.keep, self._state)
        except OSError as error:
            log.error("cannot store the ACME state: %s", error)


def _order_in_thread(plan: AcmePlan, kind: str) -> bool | Exception | None:
    """Order in this thread. Return False when another process has done so, None when another one is ordering.

    Exceptions are returned, because gevent prints those that its threads raise.
    """
    files = plan.files
    try:
        with files.locked() as has_lock:
            if not has_lock:
                return None
            if files.due_s() > time():
                return False
            key = new_key()
            chain = orders.order(plan.account, files.names, kind, key, lambda answers: _publish(files, answers))
            files.store(chain, key)
            return True
    except Exception as error:
        return error


def _publish(files: AcmeFiles, answers: Sequence[Answer]) -> None:
    """Publish answers and wait until every process of the server has them: the authority may connect to any."""
    files.publish(answers)
    if not answers:
        return
    version, began_s = files.version(), monotonic()
    sleep(_MIN_PUBLISH_S)
    while not files.all_have_read(version) and monotonic() - began_s < READ_S:
        sleep(0.02)
