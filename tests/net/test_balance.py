"""What the workers of a server share to spread connections. How they do is in tests/workers."""

from __future__ import annotations

from smqrt.net.balance import BalanceSockets
from smqrt.net.fd_channel import MOST_FDS
from smqrt.settings import MOST_WORKERS


def test_as_many_workers_as_there_may_be_get_its_descriptors() -> None:
    sockets = BalanceSockets(MOST_WORKERS)
    try:
        lists = sockets.filenos()
        assert sum(map(len, lists)) == 1 + 2 * MOST_WORKERS
        assert max(map(len, lists)) <= MOST_FDS
    finally:
        sockets.close()
