"""A cluster of two real servers as operators see it: API, metrics and `smqrt cluster status`."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from smqrt.client import SmqClient
from tests.cluster.commands import SOON, smqrt_cluster, status
from tests.conftest import Served, free_port
from tests.support.factory import Factory
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers
CHANNEL = """
channel = require"smq.mtl".server():open("tab\\there", function(node, up) channel:send "hello" end, print)
"""
PAGE = "<?lsp app.smq:connect(request) ?>"


def peers(served: Served) -> int:
    return int(requests.get(served.admin_url + "/api/v1/server", timeout=10).json()["peers"])


def looked(served: Served) -> Any:
    (row,) = requests.get(served.admin_url + "/api/v1/clusters", timeout=10).json()
    return row


def test_the_api_shows_nodes_links_interest_and_missing_links(tmp_path: Path) -> None:
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


def test_clients_of_a_drained_node_reconnect_elsewhere(tmp_path: Path) -> None:
    (tmp_path / ".preload").write_text("smq = require'smq.hub'.create{cluster = 'chat'}")
    (tmp_path / "smq.lsp").write_text(PAGE)
    there, settings = f"127.0.0.1:{free_port()}", {"SMQRT_CLUSTER__PASSWORD": "of the test"}
    with Factory(Served, Served.stop) as start, ExitStack() as stack:
        one = start(tmp_path, "--cluster-listen", there, "--workers", "2", env=settings)
        alone = smqrt_cluster(one, "drain")
        assert (alone.returncode, "no other node is linked" in alone.stderr) == (1, True)
        other = start(tmp_path, "--cluster-nodes", there, env=settings)
        wait_until(lambda: len(looked(other)["links"]) == 2, "it finds both workers through one address")
        for _ in range(6):
            client = stack.enter_context(SmqClient(f"http://127.0.0.1:{one.port}/smq.lsp", **SOON))
            client.publish("here", "a")
        wait_until(lambda: peers(one) == 6)
        number = looked(other)["node"]
        assert f"not {number}." in smqrt_cluster(one, "drain", str(number)).stderr
        assert requests.get(one.admin_url + "/readyz", timeout=10).status_code == 200
        drained = smqrt_cluster(one, "drain")
        assert (drained.returncode, drained.stdout[:15]) == (0, "no clients left"), drained.stderr
        assert peers(one) == 0
        ready = requests.get(one.admin_url + "/readyz", timeout=10)
        assert (ready.status_code, "drained" in ready.text) == (503, True)
        refused = [requests.get(one.url + "/smq.lsp", headers={"SimpleMQ": "1"}, timeout=10) for _ in range(6)]
        assert {each.status_code for each in refused} == {503}
        assert requests.get(one.url + "/", timeout=10).status_code != 503  # pages go on
        assert smqrt_cluster(one, "drain", "--undo").returncode == 0
        assert requests.get(one.admin_url + "/readyz", timeout=10).status_code == 200
        wait_until(lambda: peers(one) == 6)  # they ask again and again
