"""`smqrt serve` with journals and pipelines: what pipelines find, and the processes beside the server."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from smqrt.journal import files
from tests.conftest import Served
from tests.support.waiting import wait_until

Serve = Callable[..., Served]

pytestmark = pytest.mark.servers

PYTHON = "from smqrt import hub\nsmq = hub.create(journal={options})\n"
BESIDE = """
import sys
from smqrt.cli import main, serve
serve._pipeline_command = lambda: [sys.executable, "-u", {script!r}]
main()
"""
SCRIPT = """
import json, signal, sys, time
folder = sys.argv[1]
print("runs", folder, json.load(open(folder + "/.journal/hub.json"))["url"])
def end(*_):
    print("ends", json.load(open(folder + "/.journal/hub.json"))["url"])
    time.sleep(0.3)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
if open(folder + "/pipelines/a.py").read() == "fail":
    sys.exit("Error: something is wrong")
time.sleep(60)
"""


def application(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text("page")
    for name, text in files.items():
        path = folder / {"preload_py": ".preload.py", "preload": ".preload"}.get(name, f"pipelines/{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def with_journal(folder: Path, options: str = "True", **files: str) -> Path:
    return application(folder, preload_py=PYTHON.format(options=options), **files)


@pytest.fixture
def serve_beside(tmp_path: Path) -> Iterator[Serve]:
    """As `serve --pipelines`, with a small script in place of Spark."""
    (tmp_path / "script.py").write_text(SCRIPT)
    running: list[Served] = []

    class Beside(Served):
        program = ("-c", BESIDE.format(script=str(tmp_path / "script.py")))

    def start(*arguments: str | Path) -> Served:
        running.append(Beside("--pipelines", *arguments))
        return running[-1]

    yield start
    for served in running:
        served.stop()


def served_journal(served: Served, journal: Path) -> dict[str, Any]:
    """What the journal's folder tells of a server that listens."""
    served.wait_for("^listening on")
    found: dict[str, Any] = json.loads((journal / "hub.json").read_text())
    return found


# ---- journals


def test_a_served_journal_is_found_in_its_folder(serve: Serve, tmp_path: Path) -> None:
    app = with_journal(tmp_path / "app")
    served = serve(app)
    journal = app / ".journal"
    found = served_journal(served, journal)
    assert stat.S_IMODE((journal / "hub.json").stat().st_mode) == 0o600
    assert found["pid"] == served.process.pid
    assert found["url"].startswith(f"{served.url}/rtl/journal/")
    token = {"Authorization": f"Bearer {found['token']}"}
    assert requests.get(found["url"] + "/end", headers=token).json() == {"end": {"n1": 0}}
    assert list(requests.get(found["url"] + "/manifest", headers=token).json()["wal"]) == ["n1"]
    assert requests.get(found["url"] + "/manifest").status_code == 401
    assert requests.get(f"{served.url}/.journal/token").status_code == 404
    assert served.stop() == 0
    assert not (journal / "hub.json").exists()
    assert files.journal_token(journal) == found["token"]


def test_a_commit_reaches_subscribers_and_the_journal(serve: Serve, tmp_path: Path) -> None:
    app = application(
        tmp_path / "app",
        preload_py=PYTHON.format(options="True")
        + "def show(data, ptid, tid, subtid): print('got', data, flush=True)\nsmq.subscribe('agg/a', onmsg=show)\n",
    )
    served = serve(app)
    found = served_journal(served, app / ".journal")
    url, headers = found["url"], {"Authorization": f"Bearer {found['token']}"}
    rows = b"\0\5agg/a\0\0\0\0\0\x0212" + b"\0\5agg/b\0\3sub\0\0\0\1\xff"
    for stored in (True, False):
        answer = requests.post(f"{url}/commit?query=q&batch=3", headers=headers, data=rows)
        assert answer.json() == {"stored": stored, "rows": 2 * stored}
    served.wait_for("^got b'12'$")
    assert requests.get(f"{url}/stats", headers=headers).json()["duplicates"] == 1
    assert requests.get(f"{url}/end", headers=headers).json() == {"end": {"n1": 2}}
    assert served.output.count("got b'12'") == 1
    first = requests.get(f"{url}/manifest", headers=headers).json()["wal"]["n1"][0]
    part = requests.get(f"{url}/wal/n1/{0:020d}.arrows", headers=headers | {"Range": "bytes=0-99"})
    assert (part.status_code, len(part.content), first["first"]) == (206, 100, 0)


def test_a_journal_of_lua_on_every_interface(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", preload="smq = require'smq.hub'.create{journal=true}")
    served = serve("--host", "0.0.0.0", app)
    url = served_journal(served, app / ".journal")["url"]
    assert re.match(r"http://127\.0\.0\.1:\d+/rtl/journal/\S+$", url)


def test_several_journals_in_one_process(serve: Serve, tmp_path: Path) -> None:
    one = with_journal(tmp_path / "apps" / "one", '{"name": "one"}')
    two = with_journal(tmp_path / "apps" / "two", '{"name": "two"}')
    again = with_journal(tmp_path / "apps" / "zwei", '{"name": "two"}')
    served = serve(tmp_path / "apps")
    served.wait_for(r"^app zwei at /zwei/: failed: .*'two'")
    for app in (one, two):
        found = served_journal(served, app / ".journal")
        answer = requests.get(found["url"] + "/end", headers={"Authorization": f"Bearer {found['token']}"})
        assert answer.status_code == 200
    assert not (again / ".journal" / "hub.json").exists()


def test_a_journal_that_is_opened_later_is_announced(serve: Serve, tmp_path: Path) -> None:
    late = "import gevent\nfrom smqrt import hub\nfrom smqrt.process import current_process\n"
    late += "where = str(current_process.base_folder() / 'kept')\n"
    late += "gevent.spawn_later(0.5, lambda: app.update(smq=hub.create(journal={'path': where, 'name': 'late'})))\n"
    app = application(tmp_path / "app", preload_py=late)
    serve(app)
    wait_until((app / "kept" / "hub.json").exists)


def test_reloading_an_application_opens_its_journal_anew(serve: Serve, tmp_path: Path) -> None:
    app = with_journal(tmp_path / "app")
    served = serve("--reload", app)
    served_journal(served, app / ".journal")
    (app / ".preload.py").write_text(PYTHON.format(options="True") + "print('again', flush=True)\n")
    served.wait_for("^again$")
    served.wait_for(r"(?s)ok.*app app at /: ok")
    assert (app / ".journal" / "hub.json").exists()
    (app / ".preload.py").write_text(PYTHON.format(options="None"))
    wait_until(lambda: not (app / ".journal" / "hub.json").exists())


# ---- pipelines


def test_pipelines_run_beside_the_server_and_end_before_it(serve_beside: Serve, tmp_path: Path) -> None:
    app = with_journal(tmp_path / "apps" / "one", a="", b="")
    with_journal(tmp_path / "apps" / "two")
    served = serve_beside(tmp_path / "apps")
    url = served.wait_for(rf"^pipelines of one \| runs {app} (\S+)$")[1]
    assert url.startswith(f"{served.url}/rtl/journal/")
    assert served.stop() == 0
    assert f"pipelines of one | ends {url}" in served.lines
    assert "two |" not in served.output


def test_a_failing_pipeline_restarts_and_the_server_continues(serve_beside: Serve, tmp_path: Path) -> None:
    app = with_journal(tmp_path / "app", a="fail")
    served = serve_beside(app)
    served.wait_for(r"^pipelines of app \| Error: something is wrong$")
    served.wait_for(r"^pipelines of app: ended with exit code 1; starting again in 1 s$")
    assert requests.get(served.url).text == "page"
    (app / "pipelines" / "a.py").write_text("")
    served.wait_for(r"(?s)starting again in 1 s.*app \| runs")


def test_a_changed_pipeline_restarts_them_and_not_the_application(serve_beside: Serve, tmp_path: Path) -> None:
    app = with_journal(tmp_path / "app", a="")
    served = serve_beside("--reload", app)
    served.wait_for(r"app \| runs")
    (app / "pipelines" / "b.sql").write_text("SELECT 1")
    served.wait_for(r"(?s)app \| ends.*app \| runs")
    assert len(re.findall("^app app at /", served.output, re.MULTILINE)) == 1


def test_a_killed_server_leaves_no_pipeline_behind(serve_beside: Serve, tmp_path: Path) -> None:
    served = serve_beside(with_journal(tmp_path / "app", a=""))
    pid = int(served.wait_for(r"^pipelines of app: started, process (\d+)$")[1])
    served.wait_for(r"app \| runs")
    served.stop(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split())


def test_without_java_the_server_goes_on(serve: Serve, tmp_path: Path) -> None:
    served = serve("--pipelines", with_journal(tmp_path / "app", a=""), env={"JAVA_HOME": str(tmp_path)})
    assert requests.get(served.url).text == "page"
    told = [line for line in served.lines if line.startswith("pipelines")]
    assert len(told) == 1
    assert re.fullmatch(r"pipelines: disabled: JAVA_HOME is .*", told[0])
    assert served.stop() == 0


def test_without_pyspark_the_server_goes_on(serve: Serve, tmp_path: Path) -> None:
    hide = "import importlib.metadata as m\nreal = m.version\ndef version(name):\n    if name == 'pyspark':\n"
    hide += "        raise m.PackageNotFoundError(name)\n    return real(name)\nm.version = version\n"
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join([str(tmp_path / "hide"), os.environ.get("PYTHONPATH", "")])
    served = serve("--pipelines", with_journal(tmp_path / "app", a=""), env={"PYTHONPATH": path})
    assert requests.get(served.url).text == "page"
    served.wait_for(r"^pipelines: disabled: pyspark: not installed; pip install 'smqrt\[spark\]'$")
