"""One server process: how its parts are loaded, drained and stopped. It accepts no connection here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smqrt.apps.app_spec import AppSpec
from smqrt.auth.service import server_identity_service
from smqrt.broker.state import Hooks
from smqrt.errors import StartError
from smqrt.server.runtime import Server
from smqrt.settings.server_settings import AdminSettings, AuthSettings, LogSettings, Settings
from smqrt.smq import gevent_broker
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.transport.listener import open_listeners
from tests.cluster.engines import Client
from tests.support.waiting import let_others_run, wait_until

SETTINGS = Settings(port=0, admin=AdminSettings(enabled=False))


@pytest.fixture
def make() -> Iterator[Callable[..., Server]]:
    """Makes servers, which are stopped after the test."""
    made: list[Server] = []

    def make_server(settings: Settings = SETTINGS, lines: list[str] | None = None) -> Server:
        made.append(Server(settings, report=[].append if lines is None else lines.append))
        return made[-1]

    yield make_server
    for one in made:
        one.stop()


def application(folder: Path, source: str) -> AppSpec:
    folder.mkdir()
    (folder / ".preload").write_text(source)
    return AppSpec(folder.name, folder)


def test_a_failed_application_stops_no_other(make: Callable[..., Server], tmp_path: Path) -> None:
    server = make()
    specs = [application(tmp_path / "broken", "error'on purpose'"), application(tmp_path / "good", "loaded = true")]
    server.load(specs)
    assert [one.running for one in server.applications] == [False, True]
    (fault,) = server.failed_applications()
    assert fault.startswith("broken: ")
    assert "on purpose" in fault
    assert server.state == "loading"
    assert not server.is_successor


def test_a_server_without_certificates_reads_none_again(make: Callable[..., Server]) -> None:
    server = make()
    assert server.load_certificates() == "there are no certificates to read again"
    assert (server.port("https"), server.port() > 0) == (0, True)


def test_a_server_that_does_not_serve_closes_no_clients(make: Callable[..., Server]) -> None:
    drain = replace(SETTINGS.drain, delay_s=0)
    server = make(replace(SETTINGS, drain=drain))
    hub = GeventBroker(Hooks(), HubOptions())
    server.drain(True)
    assert server.health.drained
    let_others_run(10)
    assert not hub.draining
    server.drain(False)
    assert not server.health.drained


def test_a_drained_hub_accepts_clients_again(make: Callable[..., Server]) -> None:
    server = make()
    hub = GeventBroker(Hooks(), HubOptions())
    gevent_broker.accept_new_clients(False)
    server.drain(False)
    assert not hub.draining


def test_stop_delivers_what_was_accepted_then_closes(make: Callable[..., Server]) -> None:
    server = make()
    hub = GeventBroker(Hooks(), HubOptions())
    got: list[bytes] = []
    hub.subscribe(b"news", lambda data, *_: got.append(data))
    hub.publish(b"last", b"news")
    server.stop()
    assert got == [b"last"]
    assert server.state == "draining"
    assert hub.closed
    assert not open_listeners


def test_a_step_that_fails_does_not_end_the_stop(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    server = make()
    hub = GeventBroker(Hooks(), HubOptions())
    monkeypatch.setattr(server.http, "drain", fail)
    server.stop()
    assert hub.closed
    assert caplog.messages == ["shutdown: error at open HTTP requests"]


def test_users_of_the_server_end_with_it(make: Callable[..., Server], tmp_path: Path) -> None:
    users, lines = tmp_path / "users", list[str]()
    users.touch(0o600)
    server = make(replace(SETTINGS, auth=AuthSettings(users=str(users))), lines)
    assert server_identity_service() is server.identities is not None
    server.start()
    assert lines[-1].startswith("hubs accept: users")
    server.stop()
    assert server_identity_service() is None


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_start_reports_addresses_and_open_hubs(make: Callable[..., Server], host: str, is_open: bool) -> None:
    lines: list[str] = []
    server = make(replace(SETTINGS, host=host), lines)
    server.start()
    assert server.state == "serving"
    assert lines[0].startswith("listening on http://")
    assert lines[0].endswith(f":{server.port()}")
    assert any("hubs accept anonymous clients" in line for line in lines) is is_open


def test_a_drain_closes_clients_and_rejects_new_ones(make: Callable[..., Server]) -> None:
    drain = replace(SETTINGS.drain, delay_s=0, window_s=0)
    server = make(replace(SETTINGS, drain=drain, drain_s=0.1))
    server.start()
    hub = GeventBroker(Hooks(), HubOptions())
    client = Client(hub)
    server.drain(True)
    wait_until(lambda: client.session.closed)
    assert hub.draining
    assert GeventBroker(Hooks(), HubOptions()).draining, "later hubs too"
    server.drain(False)
    assert not hub.draining


def test_an_unwritable_access_log_stops_the_start(tmp_path: Path) -> None:
    before = list(open_listeners)
    with pytest.raises(StartError, match="log.access: .* can't be written: No such file or directory"):
        Server(replace(SETTINGS, log=LogSettings(access=str(tmp_path / "no" / "log"))))
    for listener in [one for one in open_listeners if one not in before]:
        listener.close()
