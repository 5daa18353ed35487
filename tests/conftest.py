"""Fixtures that all tests share: a real server as a process, and a real browser."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from smqrt.journal import writer
from smqrt.settings import limits
from smqrt.smq import gevent_broker
from smqrt.transport.listener import open_listeners
from tests.support import fork_server
from tests.support.factory import Factory

# A run that was started in the background ignores Ctrl-C, and so would the processes that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("any", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any")
# A Spark that lives for seconds: without Java's second compiler a start costs two thirds of the CPU time.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")

REPOSITORY = Path(__file__).parent.parent
START_S = 60
TIMEOUTS_S = {"spark": 300, "cluster": 600}
"""Longer than that of setup.cfg, after which the process ends that runs the tests: Spark starts anew for the others."""
LONGEST = [
    "bench/test_soak",
    "bench/test_journal_scale",
    "server/restart/test_load",
    "pipeline/test_interrupt",
    "pipeline/test_exactly_once",
    "pipeline/test_many_results",
    "pipeline/test_clusters",
    "pipeline/test_connect",
    "pipeline/test_beside",
    "pipeline/test_ui",
    "pipeline/test_corrections",
    "pipeline/test_failing_rows",
    "pipeline/test_delta",
    "pipeline/test_processors",
    "pipeline/test_lost_state",
    "pipeline/test_run",
]
"""Files with tests that take half a minute or more."""
SPARKS = 2
"""How many workers begin with tests of Spark: one Spark keeps a core busy while it starts."""
WAIT_MS = 20_000  # for what a page does, on a machine that has much else to do
MARKS = {
    **dict.fromkeys(("serve", "served_demos", "mosquitto", "start_mosquitto", "besiege", "besieged"), "servers"),
    **dict.fromkeys(("nats_server", "start_nats"), "servers"),
    **dict.fromkeys(("chromium", "page", "new_page"), "browser"),
    "spark": "spark",
}
PARTS = ("browser", "cluster", "spark", "servers", "unit")
"""A test that could be in two parts is in the first of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress-seconds", type=float, default=1, help="how long the large stress test lasts (default 1)")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks a test by what it uses, so that `scripts/test unit` needs no list; of those that run, the longest first."""
    mark(items)
    if to := os.environ.pop("OTHER_TEST_FILES", ""):  # not for the runs that a test starts
        write_other_files(items, Path(to))
    yield
    items[:] = longest_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Returns tests in such an order that no worker is left alone with a long one at the end.

    `--dist worksteal` gives each worker one piece of the list, of the same size: each piece begins with its share of
    the longest files. A worker takes from the end of another's piece.
    """
    files: list[list[str]] = [[] for _ in range(workers)]
    for name in LONGEST:
        is_spark = name.startswith("pipeline/")
        lanes = files[:SPARKS] if is_spark else files[SPARKS:] or files
        min(lanes, key=len).append(f"tests/{name}.py")
    long = {file for lane in files for file in lane}
    others = [item for item in items if item.nodeid.partition("::")[0] not in long]
    ordered: list[pytest.Item] = []
    for at, lane in enumerate(files):
        mine = [item for file in lane for item in items if item.nodeid.partition("::")[0] == file]
        room = max((len(items) - len(ordered)) // (workers - at) - len(mine), 0)
        ordered += mine + others[:room]
        del others[:room]
    return ordered + others


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {MARKS[name] for name in getattr(item, "fixturenames", ()) if name in MARKS}
        marks |= {mark.name for mark in item.iter_markers() if mark.name in PARTS}
        marks |= {"servers"} if "hostile" in item.path.parts else set()
        part = next((part for part in PARTS if part in marks), "unit")
        assert part != "spark" or "pipeline" in item.path.parts, f"{item.nodeid}: scripts/test looks in tests/pipeline"
        item.add_marker(part)
        if part in TIMEOUTS_S and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[part]))


def write_other_files(items: list[pytest.Item], to: Path) -> None:
    """Writes the names of the files with tests that are neither in the part `unit` nor in `spark`, once.

    A later run of the same part has only the tests that failed, and would leave out files.
    Whoever runs these tests afterwards need not import the others, which saves each worker 5 s of CPU.
    """
    if to.exists() and to.stat().st_size:
        return
    files = {item.nodeid.partition("::")[0] for item in items if not {"unit", "spark"} & {*item.keywords}}
    part = to.with_name(f"{to.name}.{os.getpid()}")
    part.write_text("\n".join(sorted(files)))
    part.replace(to)  # several workers write the same


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off while tests are collected, and then from all tests and modules.

    Collecting makes objects that stay, which each of its passes would look at: a second of CPU for 16,000 tests,
    in each worker. Later passes look at what tests have made.
    """
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def legal_moves() -> Iterator[None]:
    """No connection makes a move that its life (`smqrt.wire.connection_state`) does not have."""
    logger, records = logging.getLogger("smqrt.life"), _Records()
    logger.addHandler(records)
    yield
    logger.removeHandler(records)
    assert records.messages == []


@pytest.fixture(autouse=True)
def fresh_limits() -> None:
    """No test finds what another has counted, or that a line was in the log just now."""
    for limit in limits.registered():
        limit.count, limit.lines = 0, limits.LineLimit()


@pytest.fixture(autouse=True)
def closed_hubs() -> Iterator[None]:
    """Close what a test leaves open: others count it, or find its work in the log."""
    before = {*gevent_broker.opened(), *open_listeners, *writer.opened.values()}
    yield
    for one in [*gevent_broker.opened(), *open_listeners, *writer.opened.values()]:  # a hub closes its journal
        if one not in before:
            one.close()


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens.

    Below those that the system gives (Linux: from 32768): a connection that another test makes before this one's
    server has begun would take it. By chance, so that tests that run side by side do not get the same.
    """
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(sock.getsockname()[1])


def made_once(name: str, make: Callable[[Path], object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of the run; the first worker that asks for it lets `make` fill it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made := folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what another began and could not finish
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def build_wheel(folder: Path) -> None:
    copy = folder / "copy"
    # Other workers write there meanwhile.
    ignored = shutil.ignore_patterns("__pycache__", ".journal", ".pipelines")
    shutil.copytree(REPOSITORY / "smqrt", copy / "smqrt", ignore=ignored)
    shutil.copytree(REPOSITORY / "app_preload", copy / "app_preload", ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    # As `pip wheel` does it, in fewer processes: the backend runs with nothing but what the project asks for.
    asked = tomllib.loads((copy / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    install = ["install", "-q", "--no-compile", "--target", folder / "backend", *asked]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=100)
    build = "import sys; sys.path[:0] = sys.argv[1:2]; from setuptools.build_meta import build_wheel; build_wheel('..')"
    command = [sys.executable, "-I", "-S", "-c", build, str(folder / "backend")]
    subprocess.run(command, cwd=copy, check=True, timeout=100, stdout=subprocess.DEVNULL)


def install_wheel(python: str, wheel: Path, folder: Path, linked: bool = False, install_s: float = 300) -> str:
    """Makes a virtual environment with nothing but the wheel and what it asks for; returns its Python.

    Args:
        python: of which version.
        wheel: what is installed.
        folder: where.
        linked: what the wheel asks for is linked to what this environment has, which takes a quarter of the time
            that pip takes to choose it from an index; pip checks that nothing is missing. Only for the tests' Python.
        install_s: how long it may take.
    """
    # A pip that is there already does it: another one would have to be unpacked first. A newer Python's is faster.
    has_pip = subprocess.run([python, "-I", "-c", "import pip"], capture_output=True, check=False).returncode == 0
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=install_s)
    installed = folder / "venv/bin/python"
    if linked:
        link_requirements(wheel, next(folder.glob("venv/lib/python3*/site-packages")))
    # -I: what the environment adds to the path, for Spark's workers, has this tree, and pip would call that installed
    pip = [python if has_pip else sys.executable, "-I", "-m", "pip", "--python", str(installed)]
    command = [*pip, "install", "-q", "--no-compile", *["--no-index"] * linked, str(wheel)]
    subprocess.run(command, check=True, timeout=install_s)
    return str(installed)


def link_requirements(wheel: Path, site: Path) -> None:
    """Puts what a wheel asks for, and what that asks for in turn, into `site` as links to this environment's files."""
    (info,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    wanted: list[tuple[metadata.Distribution, str]] = [(metadata.PathDistribution(info), "")]
    there = {("smqrt", "")}
    while wanted:
        found, extra = wanted.pop()
        for one in map(Requirement, found.requires or ()):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                for key in {(str(canonicalize_name(one.name)), each) for each in ("", *one.extras)} - there:
                    there.add(key)
                    wanted.append((metadata.distribution(key[0]), key[1]))
    for name in {name for name, _ in there} - {"smqrt"}:
        for file in metadata.distribution(name).files or ():
            if ".." not in file.parts:  # a command
                link = site / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())


@pytest.fixture(scope="session")
def wheel_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree."""
    return next(made_once("wheel", build_wheel, tmp_path_factory).glob("smqrt-*.whl"))


@pytest.fixture(scope="session")
def clean_python(wheel_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment without any extra."""
    folder = made_once(
        "clean", lambda folder: install_wheel(sys.executable, wheel_path, folder, linked=True), tmp_path_factory
    )
    return str(folder / "venv/bin/python")


class Served:
    """A running `smqrt serve`.

    Attributes:
        lines: what it printed so far, standard output and errors together.
        port: the plain port; tls_port: the TLS port or 0.
        python, program: what runs in order to be `smqrt`; word: its command.
        stop_s: how long it may take to stop.
    """

    python = sys.executable
    program: tuple[str, ...] = ("-m", "smqrt")
    word = "serve"
    stop_s = 10.0

    def __init__(self, *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        words = [self.word, "--port", "0", "--admin-port", "0", *map(str, arguments)]
        self.process = self._start(words, cwd, env or {})
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _start(self, words: list[str], cwd: Path | None, env: dict[str, str]) -> Any:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | env
        is_smqrt = self.python == sys.executable and self.program == Served.program
        if is_smqrt and fork_server.is_possible(env):
            return fork_server.ForkedProcess(words, cwd, environment)
        return subprocess.Popen(
            [self.python, *self.program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            text=True,
        )

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Returns the first match of a regular expression in the output; fails when it doesn't come."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = not self._reader.is_alive()
            if match := re.search(pattern, self.output, re.MULTILINE):
                return match
            assert not ended, f"the server ended before it printed {pattern!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {pattern!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.01)

    @property
    def port(self) -> int:
        return int(self.wait_for(r"^listening on http://.*:(\d+)$")[1])

    @property
    def tls_port(self) -> int:
        return int(self.wait_for(r"^listening on https://.*:(\d+)$")[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return self.wait_for(r"^admin at (https?://\S+)/$")[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Asks the server to stop, as an operator does; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Returns the exit code of a server that ends by itself."""
        try:
            code = self.process.wait(self.stop_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(5)
        return code


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A factory: `serve(APP, "--reload", ...)` starts a real server on a free port; it is stopped after the test."""
    with Factory(Served, Served.stop) as start:
        yield start


@pytest.fixture(scope="session")
def served_demos() -> Iterator[Served]:
    """The server of the demonstration applications in app_preload/, one for the whole run."""
    served = Served(REPOSITORY / "app_preload")
    yield served
    served.stop()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Chromium under Playwright, one process for the whole run."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    # The program without a user interface of its own takes a fifth of the CPU time for each page.
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, (
        "the browser tests need Chromium; scripts/test installs it, or: apt-get install chromium-headless-shell"
    )
    quiet = "--no-first-run --disable-background-networking --disable-component-update --disable-sync"
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", *quiet.split()]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


def note_errors(page: Any, troubles: list[str]) -> None:
    """Adds to `troubles` what a page logs as an error or throws."""
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda entry: troubles.append(entry.text) if entry.type == "error" else None)


@pytest.fixture
def new_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """A factory of browser windows, each with cookies of its own: `new_page(url, phone=True)`.

    The test fails when a page logs an error or throws.
    """
    contexts: list[Any] = []
    troubles: list[str] = []

    def open_page(url: str = "about:blank", phone: bool = False) -> Any:
        size = {"width": 390, "height": 844} if phone else {"width": 1200, "height": 800}
        contexts.append(chromium.new_context(viewport=size, ignore_https_errors=True))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        note_errors(page, troubles)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles, f"the browser reported errors: {troubles}"


@pytest.fixture
def page(new_page: Callable[..., Any]) -> Any:
    """One browser window."""
    return new_page()


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function `screenshot(page, name)`: saves a picture in the folder $SMQRT_SCREENSHOTS, if there is one."""

    def take(page: Any, name: str = "") -> None:
        if folder := os.environ.get("SMQRT_SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"{request.node.name}{'-' if name else ''}{name}.png")

    return take
