"""When orders happen: back-off, renewal, one process at a time. The engine is replaced; files are real."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import gevent
import pytest
from gevent import get_hub

from smqrt.acme import files as answers
from smqrt.acme import orders
from smqrt.acme.files import HTTP_01, TLS_ALPN_01, AcmeFiles, Answer, AnswerReader, State
from smqrt.acme.orders import AcmePlan, AcmeService
from smqrt.errors import AcmeError
from tests.support.acme_authority import AcmeAuthority
from tests.support.factory import Factory
from tests.support.waiting import wait_until

NAMES = "example.com", "www.example.com"
Start = Callable[..., AcmeService]


class Engine:
    """A replacement of `orders.order`.

    Attributes:
        fails: raised by the next order, while it is there.
        kinds: of the orders.
    """

    def __init__(self, authority: AcmeAuthority) -> None:
        self._authority = authority
        self.fails: Exception | None = None
        self.kinds: list[str] = []

    def order(self, account: object, names: Sequence[str], kind: str, key: bytes, publish: object) -> bytes:
        self.kinds.append(kind)
        if self.fails is not None:
            raise self.fails
        return self._authority.signed_for(key, *names)


@pytest.fixture
def fake(authority: AcmeAuthority, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(authority)
    monkeypatch.setattr(orders, "order", made.order)
    monkeypatch.setattr(orders, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(orders, "OTHER_ORDERS_S", 0.02)
    return made


@pytest.fixture
def files(tmp_path: Path) -> AcmeFiles:
    made = AcmeFiles(tmp_path / "state", "https://ca.example/directory", NAMES)
    made.prepare()
    return made


@pytest.fixture
def start(files: AcmeFiles, tmp_path: Path) -> Iterator[Start]:
    def make(has_http: bool = True, challenge: str = "", reload: Callable[[], None] = lambda: None) -> AcmeService:
        plan = AcmePlan(files, orders.Account(files.directory, files.account), challenge)
        made = AcmeService(plan, lambda contexts: None, reload, lambda line: None, has_http, orders=True)
        made.start()
        return made

    with Factory(make, AcmeService.stop) as factory:
        yield factory


def test_after_failures_the_other_kind_is_tried(start: Start, fake: Engine) -> None:
    fake.fails = AcmeError("no luck.")
    running = start()
    wait_until(lambda: len(fake.kinds) == 3)
    assert fake.kinds == [HTTP_01, TLS_ALPN_01, HTTP_01]
    assert running.snapshot()["fault"] == "no luck."
    fake.fails = None
    wait_until(lambda: running.ordered)
    assert (running.failed, running.snapshot()["fault"]) == (3, None)


@pytest.mark.parametrize(("has_http", "challenge", "kind"), [(False, "", TLS_ALPN_01), (True, HTTP_01, HTTP_01)])
def test_failures_keep_the_only_possible_kind(
    start: Start, fake: Engine, has_http: bool, challenge: str, kind: str
) -> None:
    fake.fails = AcmeError("no luck.")
    start(has_http, challenge)
    wait_until(lambda: len(fake.kinds) == 3)
    assert set(fake.kinds) == {kind}


@pytest.mark.parametrize(("failures", "least_s"), [(0, 100.0), (3, 800.0), (100, orders.MAX_RETRY_S)])
def test_retry_delays_double_up_to_a_maximum(
    start: Start, fake: Engine, files: AcmeFiles, monkeypatch: pytest.MonkeyPatch, failures: int, least_s: float
) -> None:
    monkeypatch.setattr(orders, "FIRST_RETRY_S", 100.0)
    fake.fails = AcmeError("no luck.")
    files.store_state(State(failures))
    running = start()
    wait_until(lambda: running.failed)
    assert least_s - 5 < files.state().next_s - time.time() <= 1.25 * least_s
    assert files.state().failures == failures + 1


@pytest.mark.parametrize(("asked_s", "waited_s"), [(7200.0, 7200.0), (1e12, orders.MAX_RETRY_AFTER_S)])
def test_retry_after_is_followed(start: Start, fake: Engine, files: AcmeFiles, asked_s: float, waited_s: float) -> None:
    fake.fails = AcmeError("too many.", asked_s)
    running = start()
    wait_until(lambda: running.failed)
    assert abs(files.state().next_s - time.time() - waited_s) < 5
    fake.fails = None
    gevent.sleep(0.05)
    assert len(fake.kinds) == 1
    running.try_now()
    wait_until(lambda: running.ordered)


def test_an_internal_error_counts_as_a_failure(start: Start, fake: Engine) -> None:
    fake.fails = RuntimeError("a bug")
    running = start()
    wait_until(lambda: running.failed)
    assert "internal error" in str(running.snapshot()["fault"])


def test_one_process_at_a_time(start: Start, fake: Engine, files: AcmeFiles) -> None:
    with open(files.own / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = start()
        gevent.sleep(0.1)
        assert fake.kinds == []
    wait_until(lambda: running.ordered)


def test_what_another_process_ordered_is_taken(
    start: Start, fake: Engine, files: AcmeFiles, authority: AcmeAuthority
) -> None:
    reloads: list[int] = []
    with open(files.own / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = start(reload=lambda: reloads.append(1))
        gevent.sleep(0.05)
        files.store(*authority.certificate(*NAMES))
    wait_until(lambda: reloads)
    assert (fake.kinds, running.ordered) == ([], 0)


def test_answers_of_a_killed_process_are_removed(start: Start, fake: Engine, files: AcmeFiles) -> None:
    files.publish([Answer(HTTP_01, "example.com", "one", "one.x")])
    fake.fails = AcmeError("no luck.", 3600)
    path = "/.well-known/acme-challenge/one"
    with open(files.own / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an order is under way
        running = start()
        wait_until(lambda: running.answers.of_path(path))
    running.stop()
    running = start()
    wait_until(lambda: running.failed)
    wait_until(lambda: not running.answers.of_path(path))
    assert not files.answers.exists()


DAY_S = 86400.0


def due_days(authority: AcmeAuthority, files: AcmeFiles, *names: str) -> float:
    files.store(*authority.certificate(*names))
    return (files.due_s() - time.time()) / DAY_S


def test_a_certificate_is_renewed_before_its_last_third(authority: AcmeAuthority, files: AcmeFiles) -> None:
    authority.age = timedelta()
    found = [due_days(authority, files, *NAMES) for _ in range(20)]
    assert all(60 - 90 / 20 - 0.01 <= one <= 60 for one in found)
    assert len({round(one, 2) for one in found}) > 5  # not all at once
    assert files.due_s() == files.due_s()
    authority.lives = timedelta(days=6)
    assert 3.6 < due_days(authority, files, *NAMES) <= 4


def test_certificates_that_are_due_now(authority: AcmeAuthority, files: AcmeFiles) -> None:
    assert files.due_s() == 0.0  # self-signed
    assert due_days(authority, files, "example.com") < 0  # a name was added since
    assert due_days(authority, files, *NAMES, "third.example.com") > 0
    files.cert.write_bytes(b"damaged")
    assert files.due_s() == 0.0


@pytest.mark.parametrize("name", ["cert", "key"])
def test_a_pair_that_does_not_fit_is_replaced(authority: AcmeAuthority, files: AcmeFiles, name: str) -> None:
    """As after a crash between the two files."""
    files.store(*authority.certificate(*NAMES))
    other = dict(zip(("cert", "key"), authority.certificate(*NAMES), strict=True))
    getattr(files, name).write_bytes(other[name])
    files.prepare()
    assert files.due_s() == 0.0


def test_a_usable_pair_stays(authority: AcmeAuthority, files: AcmeFiles) -> None:
    chain, key = authority.certificate(*NAMES)
    files.store(chain, key)
    files.prepare()
    assert (files.cert.read_bytes(), files.key.read_bytes()) == (chain, key)


def test_answers_of_another_process_are_served(files: AcmeFiles) -> None:
    contexts: list[answers.Contexts] = []
    running = answers.ChallengeAnswers(files, contexts.append)
    running.start()
    assert running.of_path("/.well-known/acme-challenge/one") is None
    files.publish([Answer(HTTP_01, "example.com", "one", "one.x"), Answer(TLS_ALPN_01, "example.com", "two", "two.x")])
    wait_until(lambda: running.of_path("/.well-known/acme-challenge/one"))
    assert running.of_path("/.well-known/acme-challenge/one") == b"one.x"
    for path in ("/.well-known/acme-challenge/two", "/.well-known/acme-challenge/", "/one", "one", ""):
        assert running.of_path(path) is None
    assert list(contexts[-1]) == ["example.com"]
    files.publish([])
    wait_until(lambda: not running.of_path("/.well-known/acme-challenge/one"))
    assert contexts[-1] == {}
    running.stop()


def test_publish_waits_until_all_processes_have_the_answers(files: AcmeFiles) -> None:
    answer = Answer(HTTP_01, "example.com", "one", "one.x")
    late, soon = (answers.ChallengeAnswers(files, lambda contexts: None) for _ in range(2))
    late.start()
    late.stop()  # it looks no more
    stuck = AnswerReader(files)  # a process that is busy
    soon.start()
    begin_s = time.monotonic()
    publishing = get_hub().threadpool.spawn(orders._publish, files, [answer])
    wait_until(lambda: soon.of_path("/.well-known/acme-challenge/one"))
    with pytest.raises(gevent.Timeout):
        publishing.get(timeout=begin_s + 3 * orders._MIN_PUBLISH_S - time.monotonic())
    stuck.has_read(files.version())
    publishing.get(timeout=10)
    assert time.monotonic() - begin_s < orders.READ_S
    soon.stop()


KILLED = """
import os, sys
from pathlib import Path
from smqrt.acme.files import AcmeFiles, AnswerReader
reader = AnswerReader(AcmeFiles(Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:])))
os.kill(os.getpid(), 9)
"""


def test_a_process_that_was_killed_is_not_waited_for(files: AcmeFiles) -> None:
    arguments = [sys.executable, "-c", KILLED, str(files.folder), files.directory, *NAMES]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    assert len(list(files.readers.iterdir())) == 1
    files.publish([Answer(HTTP_01, "example.com", "one", "one.x")])
    assert files.all_have_read(files.version())


def test_answers_that_a_process_finds_at_its_start(files: AcmeFiles) -> None:
    files.publish([Answer(HTTP_01, "example.com", "one", "one.x")])
    running = answers.ChallengeAnswers(files, lambda contexts: None)
    running.start()
    assert running.of_path("/.well-known/acme-challenge/one") == b"one.x"
    running.stop()
