"""The admin listener of a real server: probes, snapshots, metrics, actions and traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
import requests
from gevent import get_hub
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions
from prometheus_client.parser import text_string_to_metric_families

from smqrt.client import SmqClient
from smqrt.operations.metrics import FORMER_NAMES
from tests.conftest import Served
from tests.support.factory import Factory
from tests.support.waiting import wait_until

PRELOAD = """
local smq = require "smq.hub"
hub = smq.create{}
hub:subscribe("room")
hub:create("other")
"""
FAILED = "error'broken on purpose'"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("apps")
    for name, code in {"good": PRELOAD, "bad": FAILED}.items():
        (folder / name).mkdir()
        (folder / name / ".preload").write_text(code)
        (folder / name / "smq.lsp").write_text("<?lsp app.hub:connect(request) ?>")
    with Factory(Served, Served.stop) as start:
        yield start(folder, "--strict")


def get(served: Served, path: str, **options: Any) -> requests.Response:
    return requests.get(served.admin_url + path, timeout=10, **options)


def create(client: SmqClient, *names: str) -> None:
    """Waits until the server knows the topics, and the client their numbers."""
    acknowledged: list[int] = []
    for name in names:
        client.create(name, lambda *_: acknowledged.append(1))
    wait_until(lambda: len(acknowledged) == len(names))


def wait_for_thread(function: Callable[[], Any]) -> Any:
    """What a function gives that blocks; the loop, on which the client lives, turns meanwhile."""
    return get_hub().threadpool.apply(function)


def api(served: Served, path: str) -> Any:
    answer = get(served, f"/api/v1/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def client(served: Served) -> Iterator[SmqClient]:
    with SmqClient(f"http://127.0.0.1:{served.port}/good/smq.lsp", uid="<script>") as client:
        wait_until(client.gettid)
        yield client


def test_probes(served: Served) -> None:
    assert get(served, "/healthz").text == "ok\n"
    ready = get(served, "/readyz")
    assert ready.status_code == 503
    assert "The application /bad/ failed" in ready.text
    assert requests.post(served.admin_url + "/healthz", timeout=5).status_code == 405


def test_snapshots_show_the_parts_of_the_server(served: Served) -> None:
    assert api(served, "server")["phase"] == "serving"
    assert [one["name"] for one in api(served, "listeners")] == ["http"]
    states = {one["name"]: one["state"] for one in api(served, "apps")}
    assert states == {"good": "running", "bad": "failed"}
    assert "broken on purpose" in next(one["error"] for one in api(served, "apps") if one["name"] == "bad")
    (hub,) = api(served, "hubs")
    assert (hub["app"], hub["topics"], hub["subscriptions"]) == ("good", 2, 1)
    limits = {one["name"]: one for one in api(served, "limits")}
    assert limits["handshakes"]["bound"] == 256
    assert (limits["names"]["title"], limits["names"]["bound"]) == ("topics of a hub, also its sub-topics", 250_000)
    assert limits["names"]["used"] == 2
    assert 0 < limits["connections"]["used"] < limits["connections"]["bound"]
    assert limits["lua_memory"]["used"] > 0
    assert limits["lua_memory"]["unit"] == "bytes"
    assert (limits["publish_rate"]["used"], limits["publish_rate"]["bound"]) == (None, "unlimited")
    assert limits["hosts"]["bound"] is None
    assert api(served, "journals") == api(served, "pipelines") == []


def test_peers_and_topics_come_in_pages(served: Served, client: SmqClient) -> None:
    acknowledged: list[int] = []
    client.subscribe("room", onmsg=print, onack=lambda accepted, *_: acknowledged.append(accepted))
    client.create("extra", lambda accepted, *_: acknowledged.append(accepted))
    wait_until(lambda: len(acknowledged) == 2)
    (hub,) = api(served, "hubs")
    (peer,) = api(served, f"peers?hub={hub['id']}&search=script")["items"]
    assert (peer["uid"], peer["address"], peer["transport"]) == ("<script>", "127.0.0.1", "raw")
    assert peer["bytes_received"] > 0
    assert peer["bytes_sent"] > 0
    assert api(served, f"peers/{peer['id']}")["etid"] == peer["etid"]
    assert api(served, f"peers/{peer['id']}/subscriptions")["items"] == ["room"]
    assert api(served, f"peers?hub={hub['id']}&search=nobody")["total"] == 0
    names, after = [], ""
    while after is not None:
        page = api(served, f"topics?hub={hub['id']}&limit=1" + (f"&after={after}" if after else ""))
        names += [one["name"] for one in page["items"]]
        after = page["after"]
    assert sorted(names) == ["extra", "other", "room"]
    largest = api(served, f"topics?hub={hub['id']}&sort=subscribers&limit=1")
    assert largest["items"][0]["name"] == "room"
    for _ in range(3):
        client.publish("hello", "room")
    get_messages = lambda: api(served, f"topics?hub={hub['id']}&sort=messages&limit=1")["items"][0]  # noqa: E731
    wait_until(lambda: wait_for_thread(get_messages)["messages"] == 3)
    assert wait_for_thread(get_messages)["name"] == "room"


def test_disconnect_by_an_operator_is_recorded(served: Served, client: SmqClient) -> None:
    (peer,) = api(served, "peers?search=script")["items"]
    answer = requests.post(
        f"{served.admin_url}/api/v1/peers/{peer['id']}/disconnect", json={"text": "go away"}, timeout=5
    )
    assert answer.json() == {"id": peer["id"], "disconnected": True}
    closed = api(served, "closed?reason=shutdown")["items"][0]
    assert (closed["uid"], closed["address"], closed["detail"]) == ("<script>", "127.0.0.1", "by an operator")
    assert closed["remedy"]
    assert [one["number"] for one in api(served, "closed?uid=<script>&limit=1")["items"]] == [closed["number"]]
    assert api(served, "closed?uid=nobody")["total"] == 0
    assert get(served, f"/api/v1/peers/{peer['id']}").status_code == 404


def test_an_operator_publishes_and_restarts(served: Served, client: SmqClient) -> None:
    got: list[bytes] = []
    acknowledged: list[int] = []
    client.subscribe("room", onmsg=lambda data, *_: got.append(data), onack=lambda *_: acknowledged.append(1))
    wait_until(lambda: acknowledged)
    (hub,) = api(served, "hubs")
    url = f"{served.admin_url}/api/v1/hubs/{hub['id']}/publish"
    assert requests.post(url, json={"topic": "room", "data": "héllo"}, timeout=5).json()["bytes"] == 6
    wait_until(lambda: got == ["héllo".encode()], got)
    restarted = requests.post(f"{served.admin_url}/api/v1/apps/bad/restart", json={}, timeout=10).json()
    assert restarted["state"] == "failed"
    assert "broken on purpose" in restarted["error"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("nothing", 404, "/api/v1/ lists"),
        ("peers?limit=0", 400, "1 to 1000"),
        ("peers?limit=x", 400, "is not a number"),
        ("peers?hub=99", 404, "no hub 99"),
        ("peers?colour=red", 400, "unknown argument"),
        ("peers?sort=x", 400, "is not one of dropped"),
        ("peers?after=%00", 400, "is not the id of a client"),
        ("peers/1", 400, "HUB.ETID"),
        ("topics", 400, "hub: an argument is needed"),
        ("server?x=1", 400, "takes no arguments"),
        ("closed?after=-1", 400, "is not a number"),
    ],
)
def test_invalid_requests_get_a_reason(served: Served, path: str, status: int, says: str) -> None:
    answer = get(served, f"/api/v1/{path}")
    assert (answer.status_code, says in answer.json()["error"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Origin": "http://evil.example", "Content-Type": "application/json"}, "{}", 403),
        ({"Host": "evil.example", "Content-Type": "application/json"}, "{}", 403),
        ({"Content-Type": "text/plain"}, "{}", 415),
        ({"Content-Type": "application/json"}, "[1]", 400),
        ({"Content-Type": "application/json"}, "[" * 100_000, 400),
        ({"Content-Type": "application/json"}, '{"text": 5}', 400),
    ],
)
def test_other_sites_and_invalid_bodies_are_rejected(
    served: Served, client: SmqClient, headers: dict[str, str], body: str, status: int
) -> None:
    (peer,) = api(served, "peers?search=script")["items"]
    url = f"{served.admin_url}/api/v1/peers/{peer['id']}/disconnect"
    assert requests.post(url, headers=headers, data=body, timeout=5).status_code == status
    assert api(served, f"peers/{peer['id']}")


def test_metrics_are_those_of_the_counters(served: Served, client: SmqClient) -> None:
    answer = get(served, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    hub = (("app", "good"), ("hub", "1"))
    assert samples["smqrt_ready",] == 0
    assert samples[("smqrt_hub_peers", *hub)] == 1
    assert samples[("smqrt_hub_closes_total", *hub, ("reason", "shutdown"))] >= 0
    assert samples["smqrt_applications", ("state", "failed")] == 1
    assert samples["smqrt_loop_lag_seconds_count",] > 0
    assert samples["process_open_fds",] > 3
    names = {one[0] for one in samples}
    assert all(names.isdisjoint(pair) or names.issuperset(pair) for pair in FORMER_NAMES.items())
    assert samples["smqrt_loop_lag_worst_seconds",] == samples["smqrt_loop_lag_max_seconds",]


def command(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "smqrt", *words, "--url", served.admin_url]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def test_commands_show_the_same(served: Served, client: SmqClient) -> None:
    hub = api(served, "hubs")[0]["id"]
    shown = command(served, "peers", "--search", "script").stdout.splitlines()
    assert shown[0].split("\t")[:2] == ["id", "uid"]
    assert shown[1].split("\t")[1] == "<script>"
    create(client, "tab\there")
    heads, shifted = (line.split("\t") for line in command(served, "topics", "--search", "tab").stdout.splitlines())
    assert (len(heads), "tab\\there" in shifted) == (len(shifted), True)
    (line,) = command(served, "topics", "--search", "room", "--json").stdout.splitlines()
    assert (json.loads(line)["name"], json.loads(line)["hub"]) == ("room", hub)
    looks = command(served, "top", "--count", "2", "--interval", "0.2", "--json").stdout.splitlines()
    assert json.loads(looks[1])["server"]["cpu_percent"] is not None
    assert command(served, "top", "--count", "1").stdout.startswith("serving up ")
    wrong = command(served, "peers", "--hub", "99")
    assert (wrong.returncode, "there is no hub 99" in wrong.stderr) == (1, True), wrong


@pytest.fixture
def tracing(served: Served) -> Iterator[Callable[..., Callable[[], list[dict[str, Any]]]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> Callable[[], list[dict[str, Any]]]:
        line = [sys.executable, "-m", "smqrt", "trace", *words, "--json", "--url", served.admin_url]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr
        assert "Tracing" in process.stderr.readline()

        def events() -> list[dict[str, Any]]:
            assert process.wait(30) == 0
            assert process.stdout
            return [json.loads(one) for one in process.stdout]

        return events

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_trace_of_a_topic(served: Served, client: SmqClient, tracing: Callable[..., Any]) -> None:
    create(client, "room", "other")
    client.createsub("sub", lambda *_: None)
    wait_until(lambda: client.subtopic2tid("sub"))
    events = tracing("--topic", "room", "--count", "4")
    client.subscribe("room", onmsg=print)
    client.publish(b"\x1b[1mhello" + b"x" * 200, "room", "sub")
    client.publish(b"elsewhere", "other")
    client.unsubscribe("room")
    client.publish(b"last", "room")
    subscribe, publish, unsubscribe, last = wait_for_thread(events)
    assert (subscribe["event"], subscribe["uid"], subscribe["topic"]) == ("subscribe", "<script>", "room")
    assert (publish["event"], publish["topic"], publish["subtopic"]) == ("publish", "room", "sub")
    assert (publish["bytes"], len(publish["payload"])) == (209, 80)
    assert unsubscribe["event"] == "unsubscribe"
    assert last["payload"] == "last"


def test_a_trace_of_a_peer(served: Served, client: SmqClient, tracing: Callable[..., Any]) -> None:
    (peer,) = api(served, "peers?search=script")["items"]
    create(client, "other")
    events = tracing("--peer", peer["id"], "--count", "4")
    before = api(served, "hubs")[0]["messages"]
    client.create("made here")
    client.publish(b"one", "other")
    wait_until(lambda: api(served, "hubs")[0]["messages"] > before)
    requests.post(f"{served.admin_url}/api/v1/peers/{peer['id']}/disconnect", json={}, timeout=5)
    found = wait_for_thread(events)
    assert [one["event"] for one in found] == ["create", "publish", "close", "connect"]
    assert found[2]["reason"] == "shutdown"


def test_wrong_traces_are_refused(served: Served) -> None:
    assert command(served, "trace").returncode == 2
    for query in ("", "peer=1.1&topic=x", "peer=1.99", "topic=x&hub=99"):
        assert get(served, f"/api/v1/trace?{query}").status_code in (400, 404), query


def test_a_server_that_is_not_ready_yet_says_so(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / ".preload").write_text("while not io:stat'go' do ba.sleep(20) end")
    admin = tmp_path / "runtime"
    admin.mkdir()
    served = serve(tmp_path, env={"XDG_RUNTIME_DIR": str(admin)})
    (file,) = wait_until(lambda: list((admin / "smqrt").glob("*.json")))
    assert file.stat().st_mode & 0o777 == 0o600
    url = json.loads(file.read_text())["url"]
    found = subprocess.run(
        [sys.executable, "-m", "smqrt", "top", "--count", "1"],
        env=os.environ | {"XDG_RUNTIME_DIR": str(admin)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.stdout.startswith("loading up "), found
    answer = requests.get(url + "readyz", timeout=5)
    assert (answer.status_code, answer.text) == (503, "The applications are being loaded.\n")
    assert requests.get(url + "healthz", timeout=5).status_code == 200
    (tmp_path / "go").touch()
    assert served.port
    assert requests.get(url + "readyz", timeout=5).status_code == 200
    assert served.stop() == 0
    assert not file.exists()


def test_other_addresses_need_users(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "index.html").touch()
    served = serve(tmp_path, "--admin-host", "0.0.0.0")
    served.wait_for("admin.host = 0.0.0.0 gives access to everyone")
    assert served.wait() == 1


def test_uptime_is_independent_of_the_clock(serve: Callable[..., Served], tmp_path: Path) -> None:
    jumps = "import time\nfrom smqrt.operations import snapshots\nsnapshots.time = lambda: time.time() - 86400\n"
    (tmp_path / ".preload.py").write_text(jumps)
    served = serve(tmp_path)
    assert served.port
    assert 0 <= api(served, "server")["uptime_s"] < 3600


# ---- MQTT clients


@pytest.fixture(scope="module")
def mqtt_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("mqtt")
    (folder / ".preload").write_text('hub = require "smq.hub".create{mqtt = true}')
    with Factory(Served, Served.stop) as start:
        yield start(folder)


def mqtt_client(served: Served, client_id: str, expiry_s: int, *topics: str) -> paho.Client:
    """Return a connected client with subscriptions."""
    client, ready = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5), threading.Event()
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = expiry_s
    client.on_subscribe = lambda *_: ready.set()
    client.on_connect = lambda *_: client.subscribe([(topic, SubscribeOptions(1)) for topic in topics])
    client.connect("127.0.0.1", served.port, properties=properties)
    client.loop_start()
    assert ready.wait(5)
    return client


def leave(client: paho.Client) -> None:
    client.disconnect()
    client.loop_stop()


def test_mqtt_clients_are_listed_with_their_sessions(mqtt_server: Served) -> None:
    client, asleep = (mqtt_client(mqtt_server, name, 600, "house/#", "+/temp") for name in ("lamp", "asleep"))
    leave(asleep)
    client.publish("house/temp", "21", 1, retain=True).wait_for_publish(5)
    client.publish("house/door", "open", 1, retain=True).wait_for_publish(5)
    (hub,) = api(mqtt_server, "hubs")
    assert hub["mqtt"].items() >= {"clients": 1, "sessions": 2, "offline": 1, "retained": 2, "filters": 2}.items()
    assert hub["mqtt"]["retained_bytes"] > 0
    (peer,) = api(mqtt_server, "peers?search=lamp")["items"]
    assert (peer["uid"], peer["transport"], peer["subscriptions"]) == ("mqtt:lamp", "mqtt", 2)
    assert peer["mqtt"].items() >= {"client_id": "lamp", "version": "5", "waiting": 0, "expiry_s": 600}.items()
    assert api(mqtt_server, f"peers/{peer['id']}/subscriptions")["items"] == ["+/temp", "house/#"]
    (session,) = api(mqtt_server, f"mqtt-sessions?hub={hub['id']}")["items"]
    assert (session["client_id"], session["waiting"], session["subscriptions"]) == ("asleep", 2, 2)
    assert 0 < session["ends_in_s"] <= 600
    leave(client)


def test_mqtt_sessions_come_in_pages(mqtt_server: Served) -> None:
    for name in ("page-b", "page-a", "page-c"):
        leave(mqtt_client(mqtt_server, name, 600, "pages"))
    (hub,) = api(mqtt_server, "hubs")
    path, names, after = f"mqtt-sessions?hub={hub['id']}&search=PAGE-&limit=2", [], ""
    while after is not None:
        page = api(mqtt_server, path + (f"&after={after}" if after else ""))
        names += [one["client_id"] for one in page["items"]]
        after = page["after"]
    assert names == ["page-a", "page-b", "page-c"]
    assert "hub: an argument is needed" in get(mqtt_server, "/api/v1/mqtt-sessions").text


def test_retained_messages_and_sessions_are_deleted(mqtt_server: Served) -> None:
    client = mqtt_client(mqtt_server, "deleter", 600, "deleted/#")
    for number in range(3):
        client.publish(f"deleted/{number}", "21", 1, retain=True).wait_for_publish(5)
    leave(client)
    (hub,) = api(mqtt_server, "hubs")
    query, url = f"hub={hub['id']}&filter=deleted/%23", f"{mqtt_server.admin_url}/api/v1/"
    assert [one["payload"] for one in api(mqtt_server, f"mqtt-retained?{query}")["items"]] == ["21"] * 3
    answer = requests.delete(f"{url}mqtt-retained?{query}", timeout=10)
    assert answer.json() == {"hub": hub["id"], "filter": "deleted/#", "deleted": 3}
    session = f"{url}mqtt-sessions?hub={hub['id']}&client=deleter"
    assert [requests.delete(session, timeout=10).status_code for _ in range(2)] == [200, 404]
    for path, status in (("mqtt-retained", 400), ("topics?hub=1", 405), ("mqtt-retained?hub=x&filter=a", 400)):
        assert requests.delete(url + path, timeout=10).status_code == status


def test_metrics_of_mqtt_clients(mqtt_server: Served, served: Served) -> None:
    client = mqtt_client(mqtt_server, "measured", 600, "measured/#")
    client.publish("measured/a", "1", 1, retain=True).wait_for_publish(5)
    found = metric_values(mqtt_server)
    assert found["smqrt_mqtt_sessions"] >= found["smqrt_mqtt_sessions_offline"] + 1
    assert found["smqrt_mqtt_retained"] >= 1
    assert found["smqrt_mqtt_retained_bytes"] > 0
    assert found["smqrt_mqtt_filters"] >= 1
    leave(client)
    assert not [name for name in metric_values(served) if "mqtt" in name]  # its hub takes no MQTT clients


def test_hubs_without_mqtt_have_no_figures_of_it(served: Served, client: SmqClient) -> None:
    (hub,) = api(served, "hubs")
    assert hub["mqtt"] is None
    assert api(served, "peers?search=script")["items"][0]["mqtt"] is None
    assert api(served, f"mqtt-sessions?hub={hub['id']}")["items"] == []


def metric_values(served: Served) -> dict[str, float]:
    """Return the metrics that have values: the last value by name."""
    families = text_string_to_metric_families(get(served, "/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}
