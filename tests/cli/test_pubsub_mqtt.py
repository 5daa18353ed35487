"""`smqrt pub` and `smqrt sub` with MQTT brokers, as a script runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.mqtt.mosquitto import Mosquitto, tls_listener
from tests.support.pki import Authority

pytestmark = pytest.mark.servers


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    running = Mosquitto(tmp_path)
    yield running
    running.stop()


def smqrt(*arguments: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "smqrt", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=20, env=os.environ | env)


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_lines_there_and_back(broker: Mosquitto, version: str) -> None:
    url = f"mqtt://{broker.address}"
    lines = b"".join(b"line %d\n" % number for number in range(5000))
    command = [
        sys.executable,
        "-m",
        "smqrt",
        "sub",
        url,
        "cli/#",
        "-v",
        "--qos",
        "1",
        "--count",
        "5000",
        "--mqtt",
        version,
    ]
    subscriber = subprocess.Popen([*command, "--uid", "subscriber"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ready = smqrt("sub", url, "ready", "--count", "1", "--timeout", "0.5")
    assert (ready.returncode, ready.stderr) == (4, b"Error: 0 of 1 messages received within 0.5 seconds\n")
    sent = smqrt("pub", url, "cli/lines", "--qos", "1", "--mqtt", version, stdin=lines)
    assert (sent.returncode, sent.stderr) == (0, b"")
    out, err = subscriber.communicate(timeout=20)
    assert (subscriber.returncode, err) == (0, b"")
    assert out == b"".join(b"cli/lines " + line + b"\n" for line in lines.splitlines())


def test_a_retained_message_as_json(broker: Mosquitto) -> None:
    url = f"mqtt://{broker.address}"
    assert smqrt("pub", url, "cli/kept", '{"a": 1}', "--qos", "2", "--retain").returncode == 0
    shown = smqrt("sub", url, "cli/kept", "--json", "--qos", "2", "--count", "1")
    expected = {
        "topic": "cli/kept",
        "qos": 2,
        "retain": True,
        "properties": {},
        "payload": '{"a": 1}',
        "json": {"a": 1},
    }
    found = json.loads(shown.stdout)
    assert found.pop("ts").endswith("Z")
    assert found == expected


def test_expiry_and_properties(broker: Mosquitto) -> None:
    url = f"mqtt://{broker.address}"
    options = ["--property", "contenttype=text/plain", "--property", "payloadformatindicator=1", "--expiry", "60"]
    colours = ["--property", "colour=red", "--property", "colour=blue=green"]
    assert smqrt("pub", url, "cli/kept", "x", "--qos", "1", "--retain", *options, *colours).returncode == 0
    shown = json.loads(smqrt("sub", url, "cli/kept", "--json", "--qos", "1", "--count", "1").stdout)
    assert 0 < shown["properties"].pop("messageexpiryinterval") <= 60
    assert shown["properties"] == {
        "contenttype": "text/plain",
        "payloadformatindicator": 1,
        "colour": ["red", "blue=green"],
    }
    for arguments, error in (
        (["--property", "x"], b"--property x: NAME=VALUE is needed, such as contenttype=text/plain"),
        (["--property", "payloadformatindicator=2"], b"property 'payloadformatindicator' can't be 2"),
        (["--expiry", "5", "--mqtt", "3.1.1"], b"--expiry and --property need MQTT 5"),
    ):
        assert error in smqrt("pub", url, "t", "x", *arguments).stderr


def test_tls_and_credentials(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.touch(0o700)
    subprocess.run(["mosquitto_passwd", "-b", passwords, "anna", "s3cret"], check=True, capture_output=True)
    certificates = Authority(tmp_path)
    common = f"allow_anonymous false\npassword_file {passwords}\nlog_dest none\nuser root\n"
    broker = Mosquitto(tmp_path, tls_listener(certificates), common)
    url, ca = f"mqtts://{broker.address}", str(certificates.path)
    good = smqrt("pub", url, "t", "x", "--cafile", ca, SMQRT_CREDENTIALS="anna:s3cret")
    bad = smqrt("pub", url, "t", "x", "--cafile", ca, SMQRT_CREDENTIALS="anna:guess")
    untrusted = smqrt("pub", url, "t", "x", SMQRT_CREDENTIALS="anna:s3cret")
    broker.stop()
    assert (good.returncode, bad.returncode, untrusted.returncode) == (0, 3, 1)
    assert b"not authorized" in bad.stderr
    assert b"not trusted" in untrusted.stderr


def test_clear_errors() -> None:
    nobody = smqrt("pub", "mqtt://127.0.0.1:1", "t", "x")
    assert (nobody.returncode, nobody.stderr.count(b"\n")) == (1, 1)
    assert smqrt("pub", "mqtt://127.0.0.1:1", "t", "x", "--subtopic", "s").returncode == 2
    assert smqrt("sub", "mqtt://h/path", "t").returncode == 2
