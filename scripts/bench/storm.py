"""Clients that connect all at once, through a Lua page: how long until all are in, how long a healthy client waits
meanwhile, and whether the kernel's list of connections overflowed. Beside it, connects one after the other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import brokers
from load import Generator
from shapes import Shape

APP = Path(__file__).parent / "soak_app"
CLIENTS = Path(__file__).parent / "soak_clients.py"
ALL_IN_BAR_S, WAIT_BAR_MS, CONNECTS_BAR_PER_S = 2.0, 100, 12_000
Report = dict[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit code: 1 when a bar was not met."""
    parser = argparse.ArgumentParser(prog="scripts/bench/storm", description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000, help="how many connect (default 10000)")
    parser.add_argument("--rounds", type=int, default=5, help="how often, each with a fresh server (default 5)")
    options = parser.parse_args(words)
    brokers.raise_file_limit()
    generator = Generator()
    if generator.name != "smqload":
        raise SystemExit(f"the storm needs the fast generator, and this is {generator.name}")
    reports = [_round(generator, options.clients) for _ in range(options.rounds)]
    found = {name: median(one[name] for one in reports) for name in reports[0]}
    print(json.dumps(found, indent=1))
    faults = _faults(found)
    print(*(f"not met: {fault}" for fault in faults), sep="\n")
    return bool(faults)


def _faults(found: Report) -> list[str]:
    faults = []
    if found["missing"] or found["all_in_s"] > ALL_IN_BAR_S:
        faults.append(f"{found['missing']} clients missing, all in after {found['all_in_s']} s; {ALL_IN_BAR_S} allowed")
    if found["healthy_wait_ms"] > WAIT_BAR_MS:
        faults.append(f"a healthy client waited {found['healthy_wait_ms']} ms; {WAIT_BAR_MS} are allowed")
    if found["listen_overflows"]:
        faults.append(f"{found['listen_overflows']} connections that the kernel had no room for")
    if found["connects_per_s"] < CONNECTS_BAR_PER_S:
        faults.append(f"{found['connects_per_s']} connects a second; {CONNECTS_BAR_PER_S} wanted")
    return faults


def _round(generator: Generator, clients: int) -> Report:
    """A fresh server on one core; the clients on the others."""
    cores = sorted(os.sched_getaffinity(0))
    server = brokers.start("smqrt", APP)
    for thread in os.listdir(f"/proc/{server.process.pid}/task"):
        os.sched_setaffinity(int(thread), cores[:1])
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        healthy = subprocess.Popen(
            [sys.executable, str(CLIENTS), "pings", str(server.port), "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert healthy.stdout
        healthy.stdout.readline()
        before = _overflows()
        storm = _connected(generator, server, clients, clients)
        overflows = _overflows() - before
        said, _ = healthy.communicate("", 30)
        # Behind the storm: the kernel seeks long for a free port among those just used towards the server.
        steady = _connected(generator, server, clients, 64)
        report = {
            "all_in_s": storm["connect_s"],
            "missing": clients - storm["ready"],
            "storm_cpu_us_per_connect": storm["cpu_us_per_conn"],
            "healthy_wait_ms": json.loads(said)["longest_ms"],
            "listen_overflows": overflows,
            "connects_per_s": steady["conn_per_s"],
            "cpu_us_per_connect": steady["cpu_us_per_conn"],
        }
        print(json.dumps(report), flush=True)
        return report
    finally:
        os.sched_setaffinity(0, cores)
        server.stop()


def _connected(generator: Generator, server: brokers.Broker, clients: int, at_once: int) -> Report:
    shape = f"--mode idle --conns {clients} --concurrency {at_once} --hold 0.5 --path /smq.lsp?hub=idle"
    return generator.run(Shape("idle", "connects", shape), server, 20)


def _overflows() -> int:
    """How many connections the kernel had no room for, since it began."""
    lines = [line.split() for line in Path("/proc/net/netstat").read_text().splitlines() if line.startswith("TcpExt")]
    return int(lines[1][lines[0].index("ListenOverflows")])


if __name__ == "__main__":
    sys.exit(main())
