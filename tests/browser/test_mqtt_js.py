"""MQTT.js in Chromium, at `/mqtt` and at the page of an application, beside a client of mosquitto."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, Served

MQTT_JS = REPOSITORY / ".venv/npm/node_modules/mqtt/dist/mqtt.min.js"
SCENARIO = """
async ([path, version, qos]) => {
  const url = location.origin.replace("http", "ws") + path, got = []
  const open = (clientId, more) =>
    mqtt.connectAsync(url, {clientId, protocolVersion: version, reconnectPeriod: 0, ...more})
  const one = await open("one", {will: {topic: "js/gone", payload: "one", qos: 1}})
  const two = await open("two", {})
  const arrived = new Promise(resolve => two.on("message", (topic, payload, packet) => {
    got.push(`${topic} ${payload} ${packet.qos} ${packet.retain}`)
    if (got.length == 23) resolve()  // the will overtakes a message with QoS 2, which waits for PUBREL
  }))
  await one.publishAsync("js/kept", "before", {qos: 1, retain: true})
  await two.subscribeAsync("js/#", {qos})
  for (let at = 0; at < 20; at++) await one.publishAsync("js/a", String(at), {qos})
  await one.publishAsync("js/big", "x".repeat(100000), {qos})
  const lost = new Promise(resolve => one.on("close", resolve))
  one.stream.socket.close()
  await lost
  await arrived
  await two.endAsync()
  return got
}
"""


@pytest.fixture
def page(serve: Callable[..., Served], new_page: Callable[..., Any]) -> Any:
    page = new_page()
    assert MQTT_JS.exists(), "scripts/test installs it with npm"
    page.add_init_script(MQTT_JS.read_text() + "\nglobalThis.mqtt = mqtt")
    served = serve(REPOSITORY / "app_preload" / "mqtt-house")
    page.goto(f"{served.url}/rtl/smq.js")
    page.served = served
    return page


@pytest.mark.parametrize(("path", "version", "qos"), [("/mqtt", 5, 2), ("/mqtt", 4, 1), ("/smq.lsp", 5, 0)])
def test_messages_retained_ones_and_wills(page: Any, path: str, version: int, qos: int) -> None:
    got = page.evaluate(SCENARIO, [path, version, qos])
    assert got[0] == f"js/kept before {min(qos, 1)} true"
    assert got[1:21] == [f"js/a {at} {qos} false" for at in range(20)]
    will, big = sorted(got[21:], key=len)
    assert len(big) == 100000 + len(f"js/big  {qos} false")
    assert will == f"js/gone one {min(qos, 1)} false"


def test_a_client_in_the_browser_and_one_of_mosquitto(page: Any, tmp_path: Path) -> None:
    words = ["mosquitto_rr", "-p", str(page.served.port), "-t", "js/ask", "-e", "js/answer", "-m", "who?", "-W", "10"]
    page.evaluate(
        """async () => {
          const client = await mqtt.connectAsync(location.origin.replace("http", "ws") + "/mqtt", {protocolVersion: 5})
          client.on("message", (topic, payload) => client.publish("js/answer", "browser, " + payload))
          await client.subscribeAsync("js/ask", {qos: 1})
        }"""
    )
    assert subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip() == "browser, who?"
