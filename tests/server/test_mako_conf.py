"""mako.conf: what it says to the server, and how its faults are told."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smqrt.cli.serve import AppSpec, discover
from smqrt.errors import StartError
from smqrt.server import listeners as ports_of_settings
from smqrt.server import mako_conf
from smqrt.server.listeners import ports
from smqrt.server.mako_conf import MakoConf
from smqrt.server.runtime import Server
from smqrt.settings.server_settings import Settings
from smqrt.settings.sources import Sources
from smqrt.transport.tls_contexts import self_signed_pair
from tests.conftest import free_port


def conf(folder: Path, text: str) -> MakoConf:
    (folder / "mako.conf").write_text(text)
    return mako_conf.read(folder / "mako.conf", ["a", "-b"], folder)


@pytest.mark.parametrize("name", ["site", "site.zip"])
def test_a_path_is_mounted_under_its_name_without_extension(tmp_path: Path, name: str) -> None:
    found = conf(tmp_path, f"apps = {{'{name}'}}").apps[0]
    assert (found.name, found.path, found.priority, found.entry) == ("site", tmp_path / name, 0, 1)


def test_forms_of_apps(tmp_path: Path) -> None:
    (tmp_path / "www").mkdir()
    apps = conf(
        tmp_path,
        """homeio = 'www'
        apps = {{name = 'shop', path = 'a/b', prio = -5}, {path = '../c'}, 'x:7:d', '::e', '/abs/f.lua'}
        """,
    ).apps
    home = tmp_path / "www"
    assert [(app.name, app.path, app.priority) for app in apps] == [
        ("shop", home / "a/b", -5),
        ("", tmp_path / "c", 0),
        ("x", home / "d", 7),
        ("", home / "e", 0),
        ("f", Path("/abs/f.lua"), 0),
    ]


def test_settings(tmp_path: Path) -> None:
    found = conf(
        tmp_path,
        """port, sslport, host, sslhost = 8080, 8443, '127.0.0.1', '127.0.0.2'
        certfile, keyfile, conncnt, sessioncnt = {'a.pem', 'b.pem'}, {'a.key', 'b.key'}, 60, 70
        commandcnt, acme, mine = 3, {}, function() end
        """,
    )
    assert found.settings == {
        "port": 8080,
        "tls_port": 8443,
        "host": "127.0.0.1",
        "max_connections": 60,
        "cert": str(tmp_path / "a.pem"),
        "key": str(tmp_path / "a.key"),
        "listener.https.certificates": [[str(tmp_path / "b.pem"), str(tmp_path / "b.key")]],
    }
    assert (found.tls_host, found.sessions, found.plain_http) == ("127.0.0.2", 70, True)
    assert found.unsupported == ["acme", "commandcnt"]


def test_a_misspelled_variable_is_found(tmp_path: Path) -> None:
    found = conf(tmp_path, "sslprot, sslhots, shop, ports, port = 8443, 'x', {}, {1}, 0 colour = 'red'")
    assert found.misspelled == {"sslhots": "sslhost", "sslprot": "sslport"}


def test_a_certificate_means_tls(tmp_path: Path) -> None:
    given = "certfile, keyfile = 'c', 'k'"
    assert conf(tmp_path, given).settings["tls_port"] == 443
    assert "tls_port" not in conf(tmp_path, given + " sslport = 0").settings


def test_the_port_0_is_no_port(tmp_path: Path) -> None:
    found = conf(tmp_path, "port, sslport = 0, 0")
    assert (found.settings, found.plain_http) == ({}, False)


def test_it_reads_globals_and_the_command_line(tmp_path: Path) -> None:
    found = conf(
        tmp_path,
        """local n = #mako.argv
        port = n + 8000; local host_ = assert(mako.env.PATH); y = port; assert(y == 8002 and type(ba) == 'table')
        if x == nil then conncnt = math.max(1, 5) end
        """,
    )
    assert found.settings == {"port": 8002, "max_connections": 5}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a = 1\nport = = 2", r"^\S+/mako.conf:2: unexpected symbol near '='$"),
        ("\n\nerror('no')", r"^\S+/mako.conf:3: no$"),
        ("error({})", r"table value"),
        ("port = 'x'", r"mako.conf: port must be a whole number from 0 to 65535, not 'x'\.$"),
        ("apps = {path = 1}", r"mako.conf: apps must be an array"),
        ("apps = {1}", r"mako.conf: apps\[1\] must be a path, or a table such as"),
        ("apps = {{name = 'a/b', path = 'x'}}", r"apps\[1\].name must be one path segment, not 'a/b'"),
        ("apps = {{path = 'x', prio = 128}}", r"apps\[1\].prio must be a whole number from -127 to 127, not 128"),
        ("certfile, keyfile = {}, 'k'", r"certfile must be the path of a file"),
        ("certfile, keyfile = {'a', 1}, 'k'", r"certfile must be the path of a file, or an array of paths"),
        ("certfile, keyfile = {'a', 'b'}, 'k'", r"certfile has 2 files and keyfile 1; the numbers must be equal"),
        ("keyfile = 'k'", r"keyfile is set alone; set both certfile and keyfile\.$"),
        ("homeio = '/not/here'", r"homeio must be a folder, not '/not/here'\.$"),
        ("sslhost = {}", r"sslhost must be a string"),
    ],
)
def test_a_fault_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(StartError, match=sentence) as caught:
        conf(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"/nope.conf does not exist\.$"):
        mako_conf.read(tmp_path / "nope.conf")


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    monkeypatch.setitem(os.environ, "HOME", str(home))
    assert mako_conf.find(here) is None
    (home / "mako.conf").touch()
    assert mako_conf.find(here) == home / "mako.conf"
    (here / "mako.conf").touch()
    assert mako_conf.find(here) == here / "mako.conf"


def test_its_applications_come_behind_those_of_the_command_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.lsp").touch()
    found = conf(tmp_path, "apps = {'b', 'gone'}")
    configured: list[Any] = [AppSpec("b", tmp_path / "b", entry=1), AppSpec("gone", tmp_path / "gone", entry=2)]
    assert discover([], [], tmp_path, found) == configured
    assert discover([], ["x::a"], tmp_path, found) == [AppSpec("x", tmp_path / "a"), *configured]
    assert discover(["a"], [], tmp_path, found) == [AppSpec("", tmp_path / "a"), *configured]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Makes servers whose other ports are two that are free, or one of them taken."""
    servers: list[Server] = []

    def bind(settings: Settings, conf: MakoConf, *others: int) -> Server:
        monkeypatch.setattr(ports_of_settings, "OTHER_PORTS", {"http": others, "https": ()})
        servers.append(Server(settings, report=lambda line: None, conf=conf))
        return servers[-1]

    yield bind
    for server in servers:
        server.stop()


def test_an_occupied_port_is_replaced_by_a_free_one(tmp_path: Path, bound: Callable[..., Server]) -> None:
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        file = tmp_path / "mako.conf"
        assert bound(Settings(port=taken), MakoConf(file, {"port": taken}), taken, free).port() == free
        with pytest.raises(StartError, match=str(taken)):
            bound(Settings(port=taken), MakoConf(file, {"port": taken}), taken)
        with pytest.raises(StartError, match=str(taken)):  # given by a flag: that one or none
            bound(Settings(port=taken), MakoConf(file), free)


def test_port_0_leaves_only_tls_listening(tmp_path: Path, bound: Callable[..., Server]) -> None:
    cert, key = self_signed_pair("localhost")
    conf = MakoConf(tmp_path / "mako.conf", plain_http=False, tls_host="127.0.0.2")
    server = bound(Settings(tls_port=0, cert=cert, key=key), conf)
    assert server.port() == 0
    socket.create_connection(("127.0.0.2", server.port("https"))).close()
    assert bound(Settings(port=0), conf).port() > 0  # somewhere it has to listen


def test_further_certificates_are_those_of_the_listener_with_tls(tmp_path: Path) -> None:
    found = conf(tmp_path, "certfile, keyfile, sslport = {'a.pem', 'b.pem'}, {'a.key', 'b.key'}, 0")
    settings = Sources(fallback=found.settings).read().settings
    further = (str(tmp_path / "b.pem"), str(tmp_path / "b.key"))
    assert settings.listener["https"].certificates == (further,)
    (port,) = [one for one in ports(replace(settings, tls_port=0), found) if one.tls]
    assert port.tls is not None
    assert port.tls.pairs == ((settings.cert, settings.key), further)
