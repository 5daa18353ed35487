"""The Python API accepts what the documents of SMQ write: tables of options, names of arguments, socket methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from tests.device import Site, publish
from tests.sites import authority, make_site, patience, site
from tests.waiting import wait_until

__all__ = ["authority", "make_site", "patience", "site"]


def f(*_: Any) -> None:
    pass


# ---- tables of options


def test_create_takes_a_dict_and_keywords_win(make_site: Callable[..., Site]) -> None:
    dropped: list[bytes] = []

    def ondrop(data: bytes, *_: Any) -> None:
        dropped.append(data)

    smq = hub.create({"queuesize": 7, "ondrop": ondrop, "rndtid": True}, queuesize=9, rndtid=None)
    assert smq.queuesize() == (9, 0)
    assert smq.gettid() != 1, "an argument that is None replaces nothing"
    smq.publish("lost", "news")
    wait_until(lambda: dropped == [b"lost"], "ondrop")
    assert hub.create({}).queuesize() == hub.create(None).queuesize() == (200, 0)


def test_a_wrong_dict_of_create_is_named_as_wrong_keywords_are() -> None:
    for call in (lambda: hub.create({"onpubish": f}), lambda: hub.create(onpubish=f)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unexpected keyword argument 'onpubish'"):
            call()
    with pytest.raises(ArgumentError, match="^queuesize must be "):
        hub.create({"queuesize": "many"})
    with pytest.raises(ArgumentError, match="^options: a dict is needed, not function$"):
        hub.create(f)  # type: ignore[arg-type]


def test_subscribe_takes_a_dict(site: Site) -> None:
    got: list[Any] = []
    tid = site.smq.subscribe("x", {"onmsg": lambda *given: got.append(given), "subtopic": "a", "json": True})
    site.smq.subscribe("x", {"onmsg": lambda *given: got.append("other")}, subtopic="b")
    site.smq.subscribe("x", {})
    device, stid = site.device(), site.smq.createsub("a")
    device.send(publish(tid, device.etid, b"[1]", stid), publish(tid, device.etid, b"2", site.smq.createsub("b")))
    wait_until(lambda: len(got) == 2, "both messages")
    assert got == [([1], device.etid, tid, stid), "other"]
    with pytest.raises(ArgumentError, match="^onmsg: a function is needed"):
        site.smq.subscribe("x", {"onmsg": 5})


def test_unknown_options_of_subscribe_are_named(caplog: pytest.LogCaptureFixture) -> None:
    hub.create().subscribe("x", {"onmsg": f, "onmesg": f, "once": True})
    assert [record.message.rpartition("/")[2].partition(":")[0] for record in caplog.records] == [
        __file__.rpartition("/")[2]
    ]
    assert "smq.subscribe has no option 'onmesg': it means nothing" in caplog.text
