"""Client certificates as logins: who their owner is, and what ends when one is revoked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.auth.identity import Method
from smqrt.errors import StartError
from smqrt.wire import smq as wire
from tests.auth.conftest import Guarded
from tests.support.device import TLS, WSS, Device, client_context, connect_packet
from tests.support.pki import Authority
from tests.support.sites import patience

__all__ = ["patience"]
RULES = "allow lamp-1 * lamps/%u/#\nallow @lamps read all"


def comes(guarded: Guarded, pair: tuple[Path, Path] | None, kind: str = TLS) -> Device:
    context = client_context(*pair) if pair else client_context()
    return guarded.site.open(kind, context).start()


def test_a_certificate_is_a_login(guard: Callable[..., Guarded], authority: Authority, tmp_path: Path) -> None:
    lamp = authority.pair("lamp-1", host="lamp-1.example", organization_unit_name="lamps")
    other = authority.pair("lamp+2", host="lamp-2.example", organization_unit_name="lamps")
    revoked = authority.revocation_list(tmp_path / "crl.pem")
    guarded = guard(RULES, auth={"certificate_user": "{cn}", "certificate_groups": "{ou}", "lists": (str(revoked),)})
    for kind in (TLS, WSS):
        device = comes(guarded, lamp, kind).connect(b"lamp-uid")
        identity = next(iter(guarded.site.state.clients())).identity
        assert (identity.user, identity.groups, identity.method) == ("lamp-1", ("lamps",), Method.CERTIFICATE)
        device.subscribe(b"lamps/lamp-1/on")
        device.subscribe(b"all")
        assert device.ask(wire.Type.SUBSCRIBE, b"lamps/x/on").denied
    for pair, says, code in ((None, b"no user name", 3), (other, b"the user name must not have + # or /", 5)):
        packet = comes(guarded, pair).send(connect_packet(b"other-uid")).until_end()[0]
        assert packet[1] == code
        assert says in packet[6:]
    assert comes(guarded, lamp).send(connect_packet(b"lamp-uid", b"ann:wrong")).until_end()[0][1] == 3

    guarded.change(acl=RULES)
    device.expect_nothing()
    authority.revocation_list(tmp_path / "crl.pem", lamp[0])
    assert guarded.service.reload() is None
    device.expect_end(wire.disconnect(b"the certificate was revoked"))
    packet = comes(guarded, lamp).send(connect_packet(b"lamp-uid")).until_end()[0]
    assert packet[1:] == b"\x05\0\0\0\0the certificate was revoked"


@pytest.mark.parametrize(
    ("auth", "sentence"),
    [
        ({"certificate_user": "{nc}"}, r"auth.certificate_user: unknown field \{nc\}; use one of"),
        ({"certificate_user": "ann"}, "auth.certificate_user must have a field of the certificate"),
    ],
)
def test_templates_are_looked_at(guard: Callable[..., Guarded], auth: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        guard(RULES, auth=auth)
