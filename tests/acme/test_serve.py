"""`tls.acme`: a server that orders its own certificate, with a certificate authority that looks at its ports."""

from __future__ import annotations

import signal
import stat
from datetime import timedelta

import pytest

from tests.acme.conftest import NAMES, Site, answer
from tests.support.acme_authority import AcmeAuthority, Problem
from tests.support.waiting import wait_until


@pytest.mark.parametrize("kind", ["http-01", "tls-alpn-01"])
def test_the_first_certificate(site: Site, authority: AcmeAuthority, kind: str) -> None:
    authority.may_verify.clear()
    served = site.start("--tls-acme-challenge", kind)
    served.wait_for("^listening on https")
    assert not site.is_trusted()  # it serves with a self-signed certificate meanwhile
    authority.may_verify.set()
    served.wait_for(rf"^certificate of example.com, www.example.com: ordered by ACME \({kind}\); renewal due at 20")
    for name in NAMES:
        with site.connect(name) as client:
            answer(client)
    assert authority.counts[f"{kind} verified"] == len(NAMES)
    assert list(authority.contacts.values()) == [["mailto:root@example.com"]]
    assert 'smqrt_acme_orders_total{outcome="ordered"} 1.0' in site.metrics()
    assert "smqrt_acme_failing 0.0" in site.metrics()
    found = list(site.state.rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}


@pytest.mark.parametrize("kind", ["http-01", "tls-alpn-01"])
def test_a_renewal_keeps_connections(site: Site, authority: AcmeAuthority, kind: str) -> None:
    authority.age = timedelta(days=70)
    site.files.prepare()
    site.files.store(*authority.certificate(*NAMES))
    authority.age = timedelta(hours=1)
    authority.may_verify.clear()
    served = site.start("--tls-acme-challenge", kind)
    served.wait_for("^listening on https")
    with site.connect() as before:
        answer(before)
        serial = str((before.getpeercert() or {})["serialNumber"])
        assert serial == site.serial()
        authority.may_verify.set()
        site.wait_ordered()
        answer(before)
    assert site.serial() != serial


def test_a_restart_orders_nothing_again(site: Site, authority: AcmeAuthority) -> None:
    site.start()
    site.wait_ordered()
    serial = site.serial()
    site.served.stop()
    site.start().wait_for("^listening on https")
    assert site.serial() == serial
    assert site.told()["next_s"] > site.files.cert.stat().st_mtime
    assert (authority.counts["newOrder"], authority.counts["newAccount"]) == (1, 1)


def test_an_authority_that_is_down(site: Site, authority: AcmeAuthority) -> None:
    authority.go_down()
    served = site.start()
    served.wait_for("ACME order failed: cannot reach http://127.0.0.1:.*/directory: .* Next attempt: 20")
    assert "Check tls.acme_directory" in served.output
    assert not site.is_trusted()  # and is served
    told = site.told()
    assert "cannot reach" in told["fault"]
    assert told["failed"] == 1
    assert "smqrt_acme_failing 1.0" in site.metrics()
    assert 'smqrt_acme_orders_total{outcome="failed"} 1.0' in site.metrics()
    authority.come_back()
    served.process.send_signal(signal.SIGHUP)
    site.wait_ordered()
    assert site.is_trusted()
    assert site.told()["fault"] is None
    assert "smqrt_acme_failing 0.0" in site.metrics()


def test_an_authority_that_refuses(site: Site, authority: AcmeAuthority) -> None:
    authority.refusals["newOrder"] = [Problem("rateLimited", "too many certificates", 429, "7200")]
    served = site.start()
    served.wait_for("ACME order failed: .* rejected the request: rateLimited: too many certificates. Wait, or")
    assert site.told()["next_s"] - site.files.answers.parent.stat().st_mtime > 7000
    site.served.stop()
    site.start().wait_for("^listening on https")
    assert "rateLimited" in site.told()["fault"]  # it is remembered, and the authority not asked again at once
    assert authority.counts["newOrder"] == 1


def test_names_that_cannot_be_verified(site: Site, authority: AcmeAuthority) -> None:
    authority.http_port = 1  # as when port 80 leads elsewhere
    served = site.start()
    served.wait_for(
        r"could not verify example.com: ConnectionRefusedError.* \(http-01\). Port 80 of the name must be forwarded"
    )
    served.process.send_signal(signal.SIGHUP)
    site.wait_ordered()  # by the other kind of challenge
    assert authority.counts["tls-alpn-01 verified"] == len(NAMES)


@pytest.mark.parametrize("kind", ["http-01", "tls-alpn-01"])
def test_several_workers(site: Site, authority: AcmeAuthority, kind: str) -> None:
    site.start("--workers", "2", "--tls-acme-challenge", kind)
    site.wait_ordered()
    wait_until(lambda: all(site.is_trusted() for _ in range(8)))
    assert authority.counts["newOrder"] == 1
    assert authority.counts[f"{kind} verified"] == len(NAMES)
    assert 'smqrt_acme_orders_total{worker="0",outcome="ordered"} 1.0' in site.metrics()
    assert site.told()["ordered"] == 1
