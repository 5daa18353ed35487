"""Orders by the engine alone: by TXT records, which need no server."""

from __future__ import annotations

import hashlib
import json
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography import x509

from smqrt.acme import orders
from smqrt.acme.files import DNS_01, HTTP_01, AcmeFiles, Answer, new_key
from smqrt.errors import AcmeError
from tests.support.acme_authority import AcmeAuthority, Problem

NAMES = "example.com", "www.example.com"


class Zone:
    """Orders at an authority that looks at TXT records.

    Attributes:
        published: what was published, one after the other.
    """

    def __init__(self, authority: AcmeAuthority, folder: Path, contact: str = "") -> None:
        self._authority, self.published = authority, list[Sequence[Answer]]()
        self.account = orders.Account(authority.url, folder, contact)

    def order(self, kind: str = DNS_01) -> x509.Certificate:
        chain = orders.order(self.account, NAMES, kind, new_key(), self._publish)
        return x509.load_pem_x509_certificates(chain)[0]

    def _publish(self, answers: Sequence[Answer]) -> None:
        self.published.append(answers)
        self._authority.texts = {
            f"_acme-challenge.{one.name}": [
                urlsafe_b64encode(hashlib.sha256(one.key_authorization.encode()).digest()).rstrip(b"=").decode()
            ]
            for one in answers
        }


@pytest.fixture
def zone(authority: AcmeAuthority, tmp_path: Path) -> Zone:
    return Zone(authority, tmp_path / "account")


def test_an_order(zone: Zone, authority: AcmeAuthority) -> None:
    found = zone.order()
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == list(NAMES)
    assert [len(one) for one in zone.published] == [2, 0]
    assert authority.counts["dns-01 verified"] == 2


def test_an_account_is_kept(zone: Zone, authority: AcmeAuthority) -> None:
    zone.order()
    zone.order()
    assert authority.counts["newAccount"] == 1
    assert list(authority.contacts.values()) == [[]]


def test_an_account_without_file_is_found_by_key(zone: Zone, authority: AcmeAuthority, tmp_path: Path) -> None:
    zone.order()
    (tmp_path / "account/account.json").unlink()
    Zone(authority, tmp_path / "account", "root@example.com").order()
    assert list(authority.contacts.values()) == [["mailto:root@example.com"]]


def test_another_contact(zone: Zone, authority: AcmeAuthority, tmp_path: Path) -> None:
    zone.order()
    Zone(authority, tmp_path / "account", "root@example.com").order()
    assert list(authority.contacts.values()) == [["mailto:root@example.com"]]


def test_an_account_that_the_authority_forgot(zone: Zone, authority: AcmeAuthority) -> None:
    zone.order()
    authority.forget_accounts()
    zone.order()
    assert len(authority.contacts) == 2


def test_a_stale_nonce_is_no_failure(zone: Zone, authority: AcmeAuthority) -> None:
    authority.refusals["newOrder"] = [Problem("badNonce", "too old")]
    zone.order()


def test_external_account_binding(zone: Zone, authority: AcmeAuthority, tmp_path: Path) -> None:
    authority.binding = "me", b"k" * 32
    with pytest.raises(AcmeError, match="Set tls.acme_eab_id and tls.acme_eab_key"):
        zone.order()
    for key, says in ((b"z" * 32, "unauthorized: wrong binding"), (b"k" * 32, "")):
        binding = "me", urlsafe_b64encode(key).rstrip(b"=").decode()
        zone.account = orders.Account(authority.url, tmp_path / "account", binding=binding)
        with pytest.raises(AcmeError, match=says) if says else nullcontext():
            zone.order()


REFUSALS = {
    "newAccount": (
        Problem("invalidContact", "no such host"),
        "rejected the request: invalidContact: no such host. Check tls.acme_c",
    ),
    "newOrder": (
        Problem("rejectedIdentifier", "not yours"),
        "rejected the request: rejectedIdentifier: not yours. Check the names",
    ),
    "newNonce": (Problem("serverInternal", "oops", 500), "responded with status 500. smqrt tries again auto"),
    "finalize": (
        Problem("caa", "CAA forbids it", 403),
        "rejected the request: caa: CAA forbids it. Change the CAA record",
    ),
    "directory": (Problem("malformed", "a\nb\n" * 500, 404), "rejected the request: malformed: a b a b .{450,500}"),
    "challenge": (Problem("unauthorized", "not now", 403), "rejected the request: unauthorized: not now. "),
    "cert": (
        Problem("rateLimited", "wait", 429, "60"),
        "rejected the request: rateLimited: wait. Wait, or use the authority's stag",
    ),
}


@pytest.mark.parametrize("where", REFUSALS)
def test_refusals_have_a_remedy(zone: Zone, authority: AcmeAuthority, where: str) -> None:
    problem, says = REFUSALS[where]
    authority.refusals[where] = [problem]
    with pytest.raises(AcmeError, match=says) as caught:
        zone.order()
    assert "\n" not in str(caught.value)
    assert round(caught.value.retry_after_s) == (60 if where == "cert" else 0)
    assert not zone.published or zone.published[-1] == []  # nothing is answered any more


def test_a_failed_verification_names_the_cause(zone: Zone, authority: AcmeAuthority) -> None:
    authority.http_port = 1
    with pytest.raises(AcmeError, match=r"could not verify example.com: .*refused.* \(http-01\). Port 80 of the name"):
        zone.order(HTTP_01)
    assert zone.published[-1] == []


def test_a_kind_that_is_not_offered(zone: Zone, authority: AcmeAuthority) -> None:
    authority.offers = ["dns-01", "tls-alpn-01", "odd-99"]
    with pytest.raises(AcmeError, match="example.com by http-01, only by: dns-01, tls-alpn-01, odd-99. Change"):
        zone.order(HTTP_01)


def test_what_is_no_authority(tmp_path: Path, authority: AcmeAuthority) -> None:
    authority.answer = lambda *_: (200, "hello", {})  # type: ignore[method-assign]
    with pytest.raises(AcmeError, match="violates RFC 8555: "):
        Zone(authority, tmp_path).order()


def test_a_silent_authority_times_out(zone: Zone, authority: AcmeAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "ORDER_S", 0.3)
    authority.may_verify.clear()
    with pytest.raises(AcmeError, match="did not finish within 0.3 s"):
        zone.order()


def test_a_folder_that_cannot_be_written(authority: AcmeAuthority, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AcmeError, match=r"cannot store .*File exists.*Check tls.acme_folder"):
        Zone(authority, tmp_path / "file" / "account").order()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'[{"kind": "http-01"}]', b"\xff", b"3"])
def test_damaged_files_are_ignored(tmp_path: Path, content: bytes) -> None:
    files = AcmeFiles(tmp_path, "https://ca.example/directory", NAMES)
    files.prepare()
    for name in ("answers.json", "state.json"):
        (files.own / name).write_bytes(content)
    assert files.published() == []
    assert files.state().failures == 0


def test_a_damaged_key_is_named(zone: Zone, tmp_path: Path) -> None:
    (tmp_path / "account").mkdir()
    (tmp_path / "account/account.key").write_text("no key")
    with pytest.raises(AcmeError, match="account.key is not a private key. Restore it, or remove it"):
        zone.order()


def test_a_damaged_account_is_found_again(zone: Zone, authority: AcmeAuthority, tmp_path: Path) -> None:
    zone.order()
    (tmp_path / "account/account.json").write_text(json.dumps(["odd"]))
    zone.order()
    assert len(authority.contacts) == 1
