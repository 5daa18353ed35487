"""Messages to systemd, the sockets it takes from it, and the units that `smqrt systemd-unit` prints."""

from __future__ import annotations

import grp
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from smqrt.errors import StartError
from smqrt.server import systemd
from tests.cli.commands import Command
from tests.conftest import Served, free_port
from tests.support.applications import application

Serve = Callable[..., Served]
unit = Command("systemd-unit")


class Manager:
    """The socket at which systemd listens; abstract when `path` begins with "@"."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + path[1:] if path.startswith("@") else path)

    def heard(self, within_s: float = 20.0) -> str:
        """The next message."""
        self._sock.settimeout(within_s)
        return self._sock.recv(4096).decode()

    def wait_for(self, line: str) -> str:
        """The next message with this line, those of the watchdog apart."""
        while line not in (text := self.heard()).split("\n"):
            assert text == "WATCHDOG=1", text
        return text

    def close(self) -> None:
        self._sock.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify") if request.param == "path" else f"@smqrt-test-{os.getpid()}")
    yield made
    made.close()


def test_a_server_reports_its_state_to_systemd(serve: Serve, tmp_path: Path, manager: Manager) -> None:
    app = application(tmp_path / "app")
    (app / ".preload.py").write_text(
        "import gevent, signal, time\n"
        "def hold():\n    end = time.monotonic() + 1\n    while time.monotonic() < end: pass\n"
        "gevent.signal_handler(signal.SIGWINCH, hold)\n"
    )
    served = serve(app, env={"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "300000"})
    ready = manager.wait_for("READY=1")
    assert f"STATUS=http://127.0.0.1:{served.port}" in ready
    for _ in range(4):
        assert manager.heard() == "WATCHDOG=1"
    served.process.send_signal(signal.SIGHUP)
    reloading = manager.wait_for("RELOADING=1")
    usec = int(re.search(r"^MONOTONIC_USEC=(\d+)$", reloading, re.MULTILINE)[1])  # type: ignore[index]
    assert abs(time.monotonic_ns() // 1000 - usec) < 20_000_000
    manager.wait_for("READY=1")
    served.process.send_signal(signal.SIGWINCH)
    longest_s, last_s = 0.0, time.monotonic()
    while longest_s < 0.7:
        assert manager.heard() == "WATCHDOG=1"
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    served.process.terminate()
    assert "EXTEND_TIMEOUT_USEC=60000000" in manager.wait_for("STOPPING=1")
    assert served.wait() == 0
    assert "systemd" not in served.output


def test_a_manager_that_is_gone_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = systemd.Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    notifier.send("READY=1")
    notifier.ready("all is\nwell")
    assert [record.getMessage() for record in caplog.records] == [
        "cannot send READY=1 to systemd: No such file or directory"
    ]
    systemd.Notifier({"NOTIFY_SOCKET": "vsock:2:1234"}).ready("")
    systemd.Notifier({}).ready("")


def watchdog_s(**environ: str) -> float:
    return systemd.Notifier({"NOTIFY_SOCKET": "/no/such/socket", **environ}).watchdog_s


def test_a_watchdog_for_another_process_is_not_fed() -> None:
    assert watchdog_s(WATCHDOG_USEC="3000000", WATCHDOG_PID="1") == 0
    assert watchdog_s(WATCHDOG_USEC="3000000", WATCHDOG_PID=str(os.getpid())) == 3
    assert watchdog_s(WATCHDOG_USEC="soon") == 0
    assert systemd.Notifier({"WATCHDOG_USEC": "3000000"}).watchdog_s == 0  # without systemd


# ---- sockets

PASS = """
import os, socket, sys
from smqrt.server import systemd
from smqrt.errors import StartError
kinds, names, listeners = sys.argv[1:]
os.closerange(3, 20)
made = []
for kind in kinds.split():
    sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET,
                         socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
    if kind == "unix":
        sock.bind("\\0smqrt-test-%d" % os.getpid())
    if kind in ("tcp", "unix"):
        sock.listen()
    made.append(sock)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(made)), "LISTEN_FDNAMES": names}
try:
    taken = systemd.passed_sockets(listeners.split(), ["local"])
    fds = {name: sock.fileno() for name, sock in taken.items()}
    print(fds, [os.get_inheritable(fd) for fd in fds.values()])
    print([name for name in os.environ if name.startswith("LISTEN_")])
except StartError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kinds", "names", "listeners", "said"),
    [
        ("tcp tcp", "https:http", "http https", "{'https': 3, 'http': 4} [False, False]\n[]"),
        ("tcp", "http", "http https", "{'http': 3} [False]\n[]"),
        ("tcp", "smqrt.socket", "http", "{'http': 3} [False]\n[]"),
        ("tcp tcp", "", "http main", "{'http': 3, 'main': 4} [False, False]\n[]"),
        (
            "tcp",
            "smqrt.socket",
            "http https",
            "systemd passes the sockets smqrt.socket, and the listeners are http, https; name each socket after its "
            "listener: FileDescriptorName=http",
        ),
        (
            "tcp tcp",
            "http:http",
            "http https",
            "systemd passes the sockets http, http, and the listeners are http, https; name each socket after its "
            "listener: FileDescriptorName=http",
        ),
        ("tcp tcp", "http", "http https", "systemd passes 2 sockets and 1 names; their numbers must be equal."),
        (
            "udp",
            "http",
            "http",
            "systemd passes 'http' (descriptor 3), which is not a TCP or Unix stream socket; write ListenStream= in "
            "the socket unit.",
        ),
        ("tcp unix", "http:local", "http local", "{'http': 3, 'local': 4} [False, False]\n[]"),
        ("tcp unix", "", "http local", "{'http': 3, 'local': 4} [False, False]\n[]"),
        ("tcp", "smqrt.socket", "http local", "{'http': 3} [False]\n[]"),
        (
            "connection",
            "http",
            "http",
            "systemd passes 'http' (descriptor 3), which is a connection; the socket unit needs Accept=no.",
        ),
    ],
)
def test_sockets_go_to_the_listeners_of_their_names(kinds: str, names: str, listeners: str, said: str) -> None:
    command = [sys.executable, "-c", PASS, kinds, names, listeners]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == said, done.stderr


def test_sockets_for_another_process_are_left_alone() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "HOME": "/"}
    assert systemd.passed_sockets(["http"], environ=environ) == {}
    assert environ == {"HOME": "/"}
    with pytest.raises(StartError, match="LISTEN_FDS=1000000; it must be from 1 to 64"):
        systemd.passed_sockets(["http"], environ={"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1000000"})


@pytest.mark.servers
def test_systemd_starts_a_server_at_its_first_client(tmp_path: Path) -> None:
    assert shutil.which("systemd-socket-activate"), "this test needs systemd: apt-get install systemd"
    app, port = application(tmp_path / "app"), free_port()
    command = [sys.executable, "-m", "smqrt", "serve", str(app), "--port", "1"]
    activate = ["systemd-socket-activate", "-l", f"127.0.0.1:{port}", "--fdname=http", *command]
    process = subprocess.Popen(activate, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                answer = requests.get(f"http://127.0.0.1:{port}/", timeout=20)
                break
            except requests.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert answer.text == "<h1>app</h1>"
        process.terminate()
        output = process.communicate(timeout=20)[0]
        assert f"listening on http://127.0.0.1:{port}" in output
        assert process.returncode == 0
    finally:
        process.kill()


# ---- units


def test_the_units_are_what_systemd_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = application(tmp_path / "an app of 100 %")
    (tmp_path / "smqrt.toml").write_text("port = 80\n[drain]\ntimeout_s = 20\n")
    service = unit.done(app, "--writable", app, "--user", "daemon")
    assert f'serve --config {tmp_path}/smqrt.toml "{tmp_path}/an app of 100 %%"\n' in service
    assert f'ReadWritePaths="{tmp_path}/an app of 100 %%"\n' in service
    assert "\nTimeoutStopSec=30\n" in service
    assert "\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n" in service
    assert "\nUser=daemon\n" in service
    (tmp_path / "smqrt.toml").unlink()
    plain = unit.done("/usr/share", "--", "--port", "9357")
    assert "serve /usr/share --port 9357\n" in plain
    assert "\nDynamicUser=yes\n" in plain
    assert "\nCapabilityBoundingSet=\n" in plain
    sock = unit.done("--socket", "http", "--listen", "127.0.0.1:80")
    files = {"smqrt.service": service, "plain.service": plain, "smqrt-http.socket": sock}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert shutil.which("systemd-analyze"), "this test needs systemd: apt-get install systemd"
    checked = subprocess.run(
        ["systemd-analyze", "verify", *files], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    rated = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "plain.service"]
    done = subprocess.run(rated, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_relative_files_of_the_configuration_are_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder of a service is another one."""
    application(tmp_path / "releases/1/app")
    (tmp_path / "releases/1/etc/tls").mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/1")
    (tmp_path / "current/etc/smqrt.toml").write_text(
        'cert = "tls/a.pem"\nkey = "/etc/a 1.key"\nlog.access = "access.log"\n[auth]\nusers = "../users"\n'
        '[listener.more]\nport = 0\ncertificates = [["tls/b 1.pem", "tls/b.key"], ["/etc/c.pem", "/etc/c.key"]]\n'
    )
    monkeypatch.chdir(tmp_path / "current")
    current = str(tmp_path / "current")
    monkeypatch.setenv("PWD", current)
    made = unit("--config", "etc/smqrt.toml", "app")
    assert made.exit_code == 0, made.output
    assert f"serve --config {current}/etc/smqrt.toml {current}/app\n" in made.stdout, "the link stays"
    variables = [
        line for line in made.stdout.splitlines() if line.startswith(("Environment=SMQRT", 'Environment="SMQRT'))
    ]
    assert variables == [
        f"Environment=SMQRT_CERT={current}/etc/tls/a.pem",
        f"Environment=SMQRT_AUTH__USERS={tmp_path}/releases/1/users",
        f'Environment="SMQRT_LISTENER__MORE__CERTIFICATES={current}/etc/tls/b 1.pem:{current}/etc/tls/b.key,'
        '/etc/c.pem:/etc/c.key"',
    ]
    assert f"Warning: {current}/etc/tls/a.pem does not exist." in made.stderr


def test_files_unreadable_for_the_service_user_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="unit-", dir="/var/tmp") as folder:
        base = Path(folder)
        base.chmod(0o755)
        app = application(base / "app")
        for name, mode in (("open.key", 0o644), ("closed.key", 0o600), ("of-a-group.key", 0o640)):
            (base / name).touch()
            (base / name).chmod(mode)
        os.chown(base / "of-a-group.key", 0, grp.getgrnam("daemon").gr_gid)
        (base / "within").mkdir(mode=0o700)
        (base / "within/users").touch()
        monkeypatch.chdir(base)

        def warned(key: str, *words: str) -> str:
            text = f'cert = "open.key"\nkey = "{key}"\n[auth]\nusers = "within/users"\n'
            (base / "smqrt.toml").write_text(text)
            made = unit(*words, app)
            assert made.exit_code == 0
            return made.stderr

        for words in ([], ["--user", "daemon"]):
            said = warned("closed.key", *words)
            assert f"{base}/closed.key can't be read by the" in said
            assert f"{base}/within/users can't be read by the" in said
            assert f": no permission for {base}/within." in said
            assert "open.key" not in said
        assert "of-a-group.key" in warned("of-a-group.key")
        assert "of-a-group.key" not in warned("of-a-group.key", "--user", "daemon")
        assert str(base) not in warned("closed.key", "--user", "root")
        assert "no user nobody-here on this machine" in warned("open.key", "--user", "nobody-here")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--socket", "http"], "--socket and --listen require each other: --socket http --listen 80."),
        (["--name", "a b"], "--name 'a b': the name of a service consists of letters, digits, and _ . @ -"),
        (["--socket", "a:b", "--listen", "80"], "the name of a listener consists of letters, digits, and _ . -"),
    ],
)
def test_what_makes_no_unit_is_said(arguments: list[str], said: str) -> None:
    code, sentence = unit.refused(*arguments)
    assert code == 1
    assert said in sentence
