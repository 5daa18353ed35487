"""A cluster of two real servers as operators see it: API, metrics and `smqrt cluster status`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests

from smqrt.client import SmqClient
from tests.conftest import Served, free_port
from tests.factory import Factory
from tests.waiting import wait_until

pytestmark = pytest.mark.servers
CHANNEL = """
channel = require"smq.mtl".server():open("tab\\there", function(node, up) channel:send "hello" end, print)
"""
PAGE = "<?lsp app.smq:connect(request) ?>"


def status(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "smqrt", "cluster", "status", "--url", served.admin_url, *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)


def looked(served: Served) -> Any:
    (row,) = requests.get(served.admin_url + "/api/v1/clusters", timeout=10).json()
    return row


def test_an_operator_sees_nodes_links_interest_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / ".preload").write_text("smq = require'smq.hub'.create{cluster = 'chat'}\n" + CHANNEL)
    (tmp_path / "smq.lsp").write_text(PAGE)
    there, nowhere = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    settings = {"SMQRT_CLUSTER__PASSWORD": "of the test"}
    with Factory(Served, Served.stop) as start:
        one = start(tmp_path, "--cluster-listen", there, env=settings)
        other = start(tmp_path, "--cluster-nodes", f"{there},{nowhere}", env=settings)
        with SmqClient(f"http://127.0.0.1:{one.port}/smq.lsp") as client:
            client.subscribe("wanted")
            wait_until(lambda: looked(other)["hubs"][0]["interest"] == 1 and looked(other)["links"][0]["round_trip_ms"])
            row = looked(other)
            (link,), (hub,) = row["links"], row["hubs"]
            assert (link["node"], link["via"], link["queued_bytes"]) == (looked(one)["node"], there, 0)
            assert (hub["cluster"], hub["nodes"], hub["joining"], hub["phantoms"]) == ("chat", [link["node"]], [], 1)
            assert [(each["address"], each["state"]) for each in row["addresses"]] == [
                (there, "linked"),
                (nowhere, "not linked"),
            ]
            (channel,) = row["channels"]
            assert (channel["channel"], channel["nodes"], channel["lost"]) == ("tab\there", [link["node"]], 0)
            assert channel["sent"] + looked(one)["channels"][0]["sent"] >= 1
            metrics = requests.get(other.admin_url + "/metrics", timeout=10).text
            assert re.search(r'smqrt_cluster_phantoms\{app=".*",cluster="chat",hub="1"\} 1.0', metrics)
            assert f'smqrt_cluster_link_sent_bytes_total{{node="{row["node"]}",peer="{link["node"]}"}}' in metrics
            shown = status(other)
            assert shown.returncode == 1
            assert f"no link to {nowhere}" in shown.stderr
            assert shown.stdout.splitlines()[1].startswith(f"{row['node']}\t{link['node']}\t{there}\t")
            assert re.search(rf"\ntab\\there\t{row['node']}\t1\t\d\t\d\t0\t0\t0\n", shown.stdout)
            assert json.loads(status(one, "--json").stdout)["hubs"][0]["cluster"] == "chat"
            assert status(one).returncode == 0
        one.stop()
        wait_until(lambda: not looked(other)["links"])
        assert looked(other)["links_lost"] == 1
