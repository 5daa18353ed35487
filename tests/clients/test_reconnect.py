"""Delays between attempts to reconnect."""

import pytest

from smqrt.clients.backoff import Backoff


def test_delays_double_up_to_a_maximum_and_reset():
    backoff = Backoff(1, 5, rnd=lambda: 0)
    assert [backoff.next_s() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next_s() == 1


@pytest.mark.parametrize("rnd", [0.0, 0.5, 0.999])
def test_jitter_takes_away_up_to_a_half(rnd):
    assert Backoff(8, 60, rnd=lambda: rnd).next_s() == pytest.approx(8 * (1 - rnd / 2))


def test_clients_do_not_come_back_together():
    assert len({Backoff(5, 60).next_s() for _ in range(100)}) > 90
