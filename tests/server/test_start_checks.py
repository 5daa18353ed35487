"""Settings that `smqrt serve` refuses before it opens a port, and `smqrt config check` in the same words."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from smqrt.cli.config import check
from smqrt.cli.serve import serve
from smqrt.errors import StartError
from smqrt.process import current_process as user_folders

LONG = "/tmp/" + "x" * 110
REFUSED = {
    "nodes without a password": ('[cluster]\nnodes = ["10.0.0.2:1900"]', "links over the network need a password"),
    "listening without a password": ('[cluster]\nlisten = "0.0.0.0:1900"', "links over the network need a password"),
    "a node that is not an address": (
        '[cluster]\npassword = "x"\nnodes = ["a:b"]',
        "'a:b' is not an address",
    ),
    "listening without a port": ('[cluster]\npassword = "x"\nlisten = "0.0.0.0:"', "'0.0.0.0:' is not an address"),
    "NATS beside addresses": ('[cluster]\npassword = "x"\nnodes = ["nats://a", "10.0.0.2"]', "give one kind only"),
    "a long directory of a cluster": (f'[cluster]\ndirectory = "{LONG}"', "cluster.directory: /tmp/xxx"),
    "a long socket for restarts": (f'[restart]\nsocket = "{LONG}"', "restart.socket: /tmp/xxx"),
    "a missing certificate of nodes": (
        '[cluster]\npassword = "x"\nlisten = "0.0.0.0:1"\nca = "no"\ncert = "no"',
        "cannot read no",
    ),
    "a filter that is none": ('[topics."a/#/b"]\nlast_value = true', "'a/#/b' is not a filter"),
    "a missing file of users": ('[auth]\nusers = "no-users"', "no-users can't be read"),
    "a missing list of rules": ('[auth]\nanonymous = true\nacl = "no-acl"', "no-acl can't be read"),
    "rules and nobody who can log in": ('[auth]\nacl = "no-acl"', "no login is possible"),
    "a missing key of tokens": ('[auth]\njwt_key = "no-key"', "no-key can't be read"),
    "a certificate without its key": ('cert = "a.pem"', "--cert needs --key"),
    "a missing certificate": ('tls_port = 0\ncert = "a.pem"\nkey = "b.pem"', "cannot read a.pem"),
    "a listener without a port": ("[listener.more]", "listener.more has no port"),
    "a missing authority of clients": ('tls_port = 0\nclient_ca = "no-ca"', "cannot read no-ca"),
    "an admin listener for all": ('[admin]\nhost = "0.0.0.0"', "admin.host = 0.0.0.0 gives access to everyone"),
    "an origin that is none": ('origins = "foo bar"', "'foo bar' is not an origin"),
    "an access log in no folder": ('[log]\naccess = "no/log"', "log.access: no/log can't be written"),
}


@pytest.fixture(autouse=True)
def no_log_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts takes the process's log and outputs."""
    monkeypatch.setattr("smqrt.cli.serve.ServerLog", Mock())
    monkeypatch.setattr("smqrt.cli.serve._guard_outputs", Mock())


@pytest.mark.parametrize(("text", "sentence"), REFUSED.values(), ids=REFUSED)
def test_check_and_serve_refuse_the_same(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "index.lsp").write_text("page")
    (tmp_path / "smqrt.toml").write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sentences = []
    for command, words in ((check, []), (serve, ["--port", "0", "--config", "smqrt.toml"])):
        with pytest.raises(StartError) as refused:
            command.main(words, standalone_mode=False)
        sentences.append(str(refused.value))
    assert sentence in sentences[0]
    assert sentences[0] == sentences[1]


def test_what_serve_makes_is_not_missed_by_check(tmp_path: Path) -> None:
    (tmp_path / "smqrt.toml").write_text('tls_port = 0\n[cluster]\npassword = "x"\nlisten = "127.0.0.1"\n')
    command = [sys.executable, "-m", "smqrt", "config", "check"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert checked.stdout == "smqrt.toml: 3 settings, all checks passed\n", checked.stderr
    assert not (tmp_path / "cache").exists()


def test_a_user_without_home_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with the number of a user that has no entry."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "index.lsp").write_text("page")
    for home in (None, ""):
        monkeypatch.delenv("HOME", raising=False) if home is None else monkeypatch.setenv("HOME", home)
        with pytest.raises(StartError, match="has no home folder, and HOME is not set.*--cert and --key"):
            serve.main(["--port", "0", "--tls-port", "0"], standalone_mode=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folders.cache_folder() == tmp_path / ".cache/smqrt"
    assert os.listdir(tmp_path) == ["index.lsp"]
