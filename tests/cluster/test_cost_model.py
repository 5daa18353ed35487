"""The plan of large clusters: what it says of one that was measured, and how it grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from smqrt.cli.admin import cluster
from smqrt.cluster.cost_model import ENGINES, MESH, Load, plan

MEASURED = Load(8, 16_000, 0, 0, 1, 0, 128, 1)
"""Eight nodes with 2,000 clients each took 82.8 MB of memory each (scripts/bench/cluster, 2026)."""


def test_it_says_what_was_measured() -> None:
    assert plan(MEASURED, MESH).memory_bytes == pytest.approx(82.8e6, rel=0.02)


def test_what_each_part_of_the_load_costs() -> None:
    none = plan(MEASURED, MESH)
    more = plan(replace(MEASURED, clients=16_008), MESH)
    assert more.memory_bytes - none.memory_bytes == pytest.approx(MESH.client_bytes + 7 * MESH.phantom_bytes)
    wanted = plan(replace(MEASURED, topics=1000, nodes_per_topic=8), MESH)
    assert wanted.memory_bytes - none.memory_bytes == pytest.approx(1000 * (MESH.topic_bytes + 1))
    busy = plan(replace(MEASURED, messages_per_s=8_000_000, nodes_per_topic=8, subscribers=8), MESH)
    assert busy.cpu["messages"] == pytest.approx(7 * (MESH.send_us + MESH.receive_us))
    assert busy.cpu["deliveries"] == pytest.approx(8 * MESH.deliver_us)
    assert busy.sent_bytes_per_s - none.sent_bytes_per_s == pytest.approx(7_000_000 * 143)
    assert "a process uses one" in busy.remarks[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_more_nodes_than_there_are_numbers(engine: str) -> None:
    found = plan(Load(2000, 10_000_000_000, 0, 0, 1, 0, 0, 1), ENGINES[engine])
    assert [remark.split(":")[0] for remark in found.remarks] == ["2,000 nodes", "5,000,000 clients for each node"]


def test_the_command_prints_each_size_and_engine() -> None:
    result = CliRunner().invoke(cluster, ["plan", "--nodes", "16", "--nodes", "2000"])
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["16", "mesh"], ["16", "NATS"], ["2000", "mesh"], ["2000", "NATS"]]
    assert rows[1][2] == "4.5G"
    assert "a cluster has at most 1023" in result.stderr
