"""Compares HTTP throughput with gevent.pywsgi and nginx (one worker): wrk, 64 keep-alive connections, interleaved."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path
from statistics import median

import brokers
import digest_load
from rich.console import Console
from rich.table import Table

CONNECTIONS = 64
P99_BAR_MS = 50
BARS = {("static", "pywsgi"): 6, ("static", "nginx"): 1 / 3, ("page", "pywsgi"): 3}
TITLES = {
    "static": "4 KB static file",
    "page": "Lua page of 50 rows",
    "digest": "the static file behind Digest",
    "session": "a page with a session and JSON",
    "sqlite": "10 rows of an SQLite database",
    "sqlite_opened": "the same, opened for each request",
}
ALONE = {"session": ("session", 4000), "sqlite": ("rows", 2000), "sqlite_opened": ("rows-opened", 2000)}
"""What is measured without a peer: the page, and its bar in requests a second."""
DATABASE = """
environment, path = luasql.sqlite(), io:realpath "" .. "/readings.db"
database = assert(environment:connect(path))
assert(database:mexec [[
   CREATE TABLE readings(id INTEGER PRIMARY KEY, name TEXT, value REAL, number INTEGER, day TEXT);
   WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 1000)
   INSERT INTO readings SELECT x, 'sensor ' || x, x * 1.5, x, '2026-01-01' FROM n]])
"""
DIGEST_BAR = 1 / 3  # of what the same file does without a login
MAX_PER_S = 30_000  # requests with credentials that are made for a second of measuring

Report = dict[str, float]
Results = dict[str, dict[str, list[Report]]]  # row → server → one report per round


def main() -> None:
    options = parse()
    for program in ("wrk", "nginx"):
        if not shutil.which(program):
            raise SystemExit(f"{program} is missing; as root, type: apt-get install wrk nginx-light")
    results = measure(options.rounds, options.seconds)
    console = Console()
    console.width = max(console.width, 120)
    console.print(as_table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/http", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    parser.add_argument("--seconds", type=int, default=3, help="how long one measurement lasts (default 3)")
    parser.add_argument("--json", type=Path, help="also write every report to this file")
    return parser.parse_args()


def measure(rounds: int, seconds: int) -> Results:
    results: Results = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="smqrt-http-") as name:
        folder = Path(name)
        app = folder / "app"
        shutil.copytree(brokers.APP, app)
        (app / "static.html").write_bytes(b"smqrt\n" * 682 + b"....")
        with (app / ".preload").open("a") as preload:
            preload.write(digest_load.PRELOAD + DATABASE)
        ours = brokers.start("smqrt", app)
        others: list[subprocess.Popen[str]] = []
        try:
            ready_made(ours.port, folder)
            ports = {"smqrt": ours.port}
            for server in (pywsgi, nginx):
                process, ports[server.__name__] = server(folder)
                others.append(process)
            for _ in range(rounds):
                for row, path in (("static", "/static.html"), ("page", "/table.lsp")):
                    for server_name, port in ports.items():
                        results[row][server_name].append(wrk(f"http://127.0.0.1:{port}{path}", seconds))
                url = f"http://127.0.0.1:{ours.port}/closed/static.html"
                script = digest_load.write(folder, url, MAX_PER_S * seconds)
                results["digest"]["smqrt"].append(wrk(url, seconds, "-s", str(script)))
                for row, (page, _) in ALONE.items():
                    results[row]["smqrt"].append(alone(f"http://127.0.0.1:{ours.port}/{page}.lsp", seconds))
        finally:
            ours.stop()
            for process in others:
                process.terminate()
                process.wait()
    return results


def alone(url: str, seconds: int) -> Report:
    """Measures a page of ours, with the session that its first answer gave."""
    with urllib.request.urlopen(url) as answer:
        cookie = (answer.headers["Set-Cookie"] or "").partition(";")[0]
    return wrk(url, seconds, "-H", f"Cookie: {cookie}")


def ready_made(port: int, folder: Path) -> None:
    """Saves what our server answers, so that the others serve the same bytes."""
    site = folder / "site"
    site.mkdir()
    for name in ("static.html", "table.lsp"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}") as answer:
            (site / name).write_bytes(answer.read())


def pywsgi(folder: Path) -> tuple[subprocess.Popen[str], int]:
    port = brokers.free_port()
    program = Path(__file__).parent / "pywsgi_server.py"
    return started([sys.executable, str(program), str(port), str(folder / "site")], port)


def nginx(folder: Path) -> tuple[subprocess.Popen[str], int]:
    port = brokers.free_port()
    text = f"""
        worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
        {"user root;" if os.geteuid() == 0 else ""}
        events {{ worker_connections 1024; }}
        http {{
            access_log off; keepalive_requests 100000000; sendfile on; tcp_nopush on;
            types {{ text/html html lsp; }}
            client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
            uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
            server {{ listen 127.0.0.1:{port}; root {folder}/site; }}
        }}"""
    (folder / "nginx.conf").write_text(text)
    return started(["nginx", "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"], port)


def started(command: list[str], port: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    brokers.wait_until_open(command[0], process, port)
    return process, port


def wrk(url: str, seconds: int, *more: str) -> Report:
    """Returns requests per second, the 99th percentile in ms, and errors of any kind."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--latency", *more, url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s)", output)
    assert rate, output
    assert p99, output
    errors = re.findall(r"(?:Non-2xx or 3xx responses: |connect |read |write |timeout )(\d+)", output)
    scale = {"us": 1e-3, "ms": 1.0, "s": 1e3}[p99[2]]
    return {"per_s": float(rate[1]), "p99_ms": float(p99[1]) * scale, "errors": float(sum(map(int, errors)))}


def as_table(results: Results) -> Table:
    table = Table(
        title=f"Requests per second, {CONNECTIONS} keep-alive connections, median (ours / theirs, beside its bar)"
    )
    for column in ("", "smqrt", "pywsgi", "nginx, 1 worker", f"smqrt p99 ms (bar {P99_BAR_MS})", "errors"):
        table.add_column(column, justify="right")
    for row, by_server in results.items():
        ours = middle(by_server["smqrt"], "per_s")
        cells = [
            cell(row, name, ours, middle(by_server[name], "per_s")) for name in ("pywsgi", "nginx") if name in by_server
        ]
        errors = ", ".join(
            f"{name} {total:.0f}" for name, reports in by_server.items() if (total := sum(r["errors"] for r in reports))
        )
        if row == "digest":
            cells = [share(ours / middle(results["static"]["smqrt"], "per_s")), ""]
        if row in ALONE:
            bar = ALONE[row][1]
            cells = [f"[{'green' if ours >= bar else 'red'}]bar[/] {bar:,}", ""]
        table.add_row(
            TITLES[row], f"{ours:,.0f}", *cells, f"{middle(by_server['smqrt'], 'p99_ms'):.2f}", errors or "none"
        )
    return table


def share(ratio: float) -> str:
    colour = "green" if ratio >= DIGEST_BAR else "red"
    return f"[{colour}]{ratio:.2f}[/]/{DIGEST_BAR:.2g} of the open one"


def middle(reports: list[Report], key: str) -> float:
    return median(report[key] for report in reports)


def cell(row: str, name: str, ours: float, theirs: float) -> str:
    ratio, bar = ours / theirs, BARS.get((row, name))
    if bar is None:
        return f"{theirs:,.0f} {ratio:.2f}x"
    colour = "green" if ratio >= bar else "red"
    return f"{theirs:,.0f} [{colour}]{ratio:.2f}x[/]/{bar:.2g}x"


if __name__ == "__main__":
    main()
