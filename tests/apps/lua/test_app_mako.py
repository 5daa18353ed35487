"""The applications in examples/mako: a folder with a mako.conf, started as Mako starts it."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from requests.auth import HTTPDigestAuth

from tests.conftest import Served

APP = Path(__file__).parent.parent / "examples" / "mako"
pytestmark = pytest.mark.servers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(APP, tmp_path / "start")


def test_a_folder_with_a_mako_conf(folder: Path, tmp_path: Path, serve: Callable[..., Served]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        env = {"SSL_PORT": str(busy.getsockname()[1]), "XDG_CACHE_HOME": str(tmp_path)}
        served = serve("--", "-verbose", cwd=folder, env=env)
        assert 9443 <= served.tls_port <= 9460
    assert requests.get(served.url + "/desk/").text == "red"
    facts = requests.get(served.url + "/conf.lsp").json()
    assert "module 'pgsql' not found:" in facts.pop("pgsql")
    assert facts == {
        "key": "s3cret",
        "door": "doors/2",
        "log": 25,
        "greeting": f"hello Ann on {env['SSL_PORT']}",
        "absent": True,
        "same": True,
        "verbose": True,
        "file": "mako.conf",
        "dir": True,
        "udb": True,
        "certs": True,
        "port": served.port,
        "sslport": served.tls_port,
    }
    served.wait_for(f"^configuration: {folder}/mako.conf$")
    served.wait_for(r"^app missing at /missing/: failed: .*/missing: notfound")
    assert served.wait_for(r"not used by this server: (.*)")[1] == "commandcnt, timertick"
    assert served.output.count("not used by") == 1
    assert [requests.get(served.url + "/sessions.lsp").text for _ in range(3)][-1] == "2\n"
    assert requests.get(served.url + "/again.lsp").text == "ok\n"


def test_a_broken_one_ends_the_start_with_an_error(folder: Path) -> None:
    (folder / "other.conf").write_text("port = 80\napps = {'site'")
    served = Served("-c", "other.conf", cwd=folder)
    assert served.wait() == 1
    assert served.lines == [f"Error: {folder}/other.conf:2: '}}' expected near <eof>"]


def test_flags_win_and_the_file_is_not_shown(folder: Path, serve: Callable[..., Served]) -> None:
    (folder / "index.html").write_text("home")
    (folder / "mako.conf").write_text("host = '127.0.0.2'\ncinfo = 1")
    served = serve("--host", "127.0.0.1", ".", cwd=folder)
    assert requests.get(served.url).text == "home"
    assert requests.get(served.url + "/mako.conf").status_code == 404


def test_users_protect_what_the_file_says(folder: Path, serve: Callable[..., Served]) -> None:
    served = serve("-c", "users.conf", cwd=folder)
    ann, wrong = HTTPDigestAuth("ann", "secret"), HTTPDigestAuth("ann", "guess")
    assert requests.get(served.url + "/users.lsp").text == ("2\tsecret\tuserdata\t/rtl/tracelogger.service/\t/rtl/\n")
    refused = requests.get(served.url + "/desk/")
    assert (refused.status_code, 'realm="Doors"' in refused.headers["WWW-Authenticate"]) == (401, True)
    assert requests.get(served.url + "/desk/", auth=wrong).status_code == 401
    assert requests.get(served.url + "/desk/", auth=ann).text == "none"
    trace, by_script = served.url + "/rtl/tracelogger.service/", {"X-Requested-With": "XMLHttpRequest"}
    assert requests.get(trace, headers=by_script).status_code == 401
    assert requests.get(trace, headers=by_script, auth=ann).status_code == 204


def test_file_servers(folder: Path, tmp_path: Path, serve: Callable[..., Served]) -> None:
    (tmp_path / "files").mkdir()
    (folder / "mako.conf").write_text(
        f"""users = {{ann = "secret"}}
        fileserver = {{path = "{tmp_path}/files", fsname = "share", lockdir = ".LOCK"}}
        homeio = "site"
        apps = {{{{name = "desk", path = "../desk", dav = "edit"}}}}"""
    )
    served = serve(cwd=folder)
    ann = HTTPDigestAuth("ann", "secret")
    for url, path in (("/share/a.txt", tmp_path / "files/a.txt"), ("/desk/edit/a.txt", folder / "desk/a.txt")):
        assert requests.put(served.url + url, b"new").status_code == 401
        assert requests.put(served.url + url, b"new", auth=ann).status_code == 201
        assert path.read_text() == "new"
    (folder / "desk/home.lsp").write_text("<?lsp print(ba.openio'home':realpath'', mako.fs:baseuri()) ?>")
    assert requests.get(served.url + "/desk/home.lsp").text == f"{folder}/site\t/share/\n"
    assert requests.get(served.url + "/desk/edit/.preload", auth=ann).status_code == 200
    assert requests.get(served.url + "/desk/.preload", auth=ann).status_code == 404


def test_what_needs_users_is_not_served_without(folder: Path, serve: Callable[..., Served]) -> None:
    (folder / "mako.conf").write_text(
        """apps = {{name = "", path = "desk", auth = true}}
        fileserver, tracelogger, users = {path = "."}, true, {ann = 1}"""
    )
    served = serve(cwd=folder)
    assert requests.get(served.url).status_code == 503
    served.wait_for(r"app desk at /: failed: apps\[1\].auth needs users in mako.conf")
    served.wait_for(r"^mako.conf: users.ann must be a password, or a table with its HA1, not 1$")
    served.wait_for(r"^mako.conf: tracelogger: its login needs the users of mako.conf, and these are invalid$")
    assert requests.get(served.url + "/rtl/tracelogger.service/").status_code == 503


def test_the_trace_logger_by_a_flag_alone(folder: Path, serve: Callable[..., Served]) -> None:
    with_it = serve("--tracelogger", cwd=folder / "desk")
    by_script = {"X-Requested-With": "XMLHttpRequest"}
    assert requests.get(with_it.url + "/rtl/tracelogger.service/", headers=by_script).status_code == 204
    without = serve(cwd=folder / "desk")
    assert requests.get(without.url + "/rtl/tracelogger.service/", headers=by_script).status_code == 404
