"""`tls.acme` through hot restarts, with a new process while an order is under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acme.conftest import NAMES, Site
from tests.server.restart.hot import HotServed
from tests.support.acme_authority import AcmeAuthority
from tests.support.factory import Factory
from tests.support.waiting import wait_until


@pytest.mark.servers
def test_a_hot_restart_orders_nothing_again(authority: AcmeAuthority, tmp_path: Path) -> None:
    with Factory(HotServed, HotServed.end) as serve_hot:
        site = Site(serve_hot, authority, tmp_path)
        served = site.start()
        site.wait_ordered()
        serial = site.serial()
        assert isinstance(served, HotServed)
        served.restart()
        assert site.serial() == serial
    assert authority.counts["newOrder"] == 1


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["http-01", "tls-alpn-01"])
def test_a_hot_restart_while_the_authority_verifies(authority: AcmeAuthority, tmp_path: Path, kind: str) -> None:
    """The old process is gone with its order; the new one, which has the answers too, orders anew."""
    authority.may_verify.clear()
    with Factory(HotServed, HotServed.end) as serve_hot:
        site = Site(serve_hot, authority, tmp_path)
        served = site.start("--tls-acme-challenge", kind)
        wait_until(lambda: authority.counts["challenge"] == len(NAMES))
        assert isinstance(served, HotServed)
        served.restart()
        authority.may_verify.set()
        site.wait_ordered()
        assert site.is_trusted()
    assert authority.counts[f"{kind} failed"] == 0
