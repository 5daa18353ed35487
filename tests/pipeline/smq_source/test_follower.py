"""A stream over HTTP asks the hub where the journal ends only when it has grown."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal.remote import RemoteJournal
from smqrt.pipeline.smq_source.reading import REQUEST_INTERVAL_S, JournalFollower
from tests.pipeline.hubs import JournalingHub
from tests.support.waiting import wait_until


class Counting(RemoteJournal):
    """Counts the requests for the end."""

    asked: list[str]

    def end(self, known: object = ()) -> dict[str, int]:
        self.asked.append("end")
        return super().end()

    def wait(self, after: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        self.asked.append("wait")
        return super().wait(after, timeout_s)

    def __copy__(self) -> Counting:
        return counting(self.url, self._address.token, self._link.retry_s, self.asked)


def counting(url: str, token: str, retry_s: float, asked: list[str]) -> Counting:
    journal = Counting(url, token, retry_s=retry_s)
    journal.asked = asked
    return journal


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[JournalingHub]:
    running = JournalingHub(tmp_path / "app")
    yield running
    running.stop()


def test_one_request_stays_open_while_nothing_comes(hub: JournalingHub) -> None:
    journal = counting(hub.announced["url"], hub.announced["token"], 1.0, [])
    follower = JournalFollower(journal)
    for _ in range(100):
        assert follower.end() == {"n1": 0}
        time.sleep(0.005)  # the pace of micro-batches
    assert journal.asked == ["end", "wait"]
    hub.publish("a", 0, 10)
    wait_until(lambda: follower.end() == {"n1": 10}, "the hub has told that there is more")
    time.sleep(3 * REQUEST_INTERVAL_S)  # it would have asked three times
    assert len(journal.asked) <= 5, "it may have been told in parts"
    follower.stop()


def test_a_lost_hub_is_reported_and_followed_after_return(hub: JournalingHub) -> None:
    follower = JournalFollower(counting(hub.announced["url"], hub.announced["token"], 0.2, []))
    assert follower.end() == {"n1": 0}
    time.sleep(0.1)  # it waits at the hub
    began_s = time.monotonic()
    hub.stop()
    assert time.monotonic() - began_s < 1.5, "who waits does not hold the hub that ends"
    with pytest.raises(JournalError, match=r"The hub hasn't answered for 0\.2 s"):
        wait_until(lambda: follower.end() != {"n1": 0}, "the hub is away")
    hub._start(hub.port)
    hub.publish("a", 0, 3)
    wait_until(lambda: follower.end() == {"n1": 3}, "it is followed again")
    follower.stop()


def test_a_copy_in_another_process_asks_for_itself(hub: JournalingHub) -> None:
    follower = JournalFollower(RemoteJournal(hub.announced["url"], hub.announced["token"]))
    follower.end()
    for other in (copy.copy(follower), pickle.loads(pickle.dumps(follower))):
        assert other._thread is None
        assert other.end() == {"n1": 0}
        other.stop()
    follower.stop()
