"""The table of settings: one file, and every form made from it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from smqrt.client.options import SmqClientOptions
from smqrt.errors import StartError
from smqrt.journal.settings import JournalSettings
from smqrt.mqtt.options import MqttOptions
from smqrt.net.broker import HubOptions
from smqrt.options import manual as manual_of
from smqrt.settings import Settings, environment_name, flag, load_file, manual, table


def test_spellings() -> None:
    tls_port = next(setting for setting in table() if setting.name == "tls_port")
    assert (flag(tls_port), environment_name(tls_port)) == ("--tls-port", "SMQRT_TLS_PORT")
    assert Settings().port == 9357


def test_the_manual_shows_the_table() -> None:
    page = resources.files("smqrt") / "help" / "serving.md"
    assert manual() in page.read_text("utf-8")


def test_a_file_gives_values(tmp_path: Path) -> None:
    path = tmp_path / "smqrt.toml"
    path.write_text('port = 80\nhost = "::"\n')
    assert load_file(path) == {"port": 80, "host": "::"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("prot = 80", "prot is no option; did you mean port\\? There are: host, port"), ("port 80", "is not valid TOML")],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "smqrt.toml"
    path.write_text(text)
    with pytest.raises(StartError, match=sentence):
        load_file(path)


def test_a_missing_file_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't be read: No such file"):
        load_file(tmp_path / "smqrt.toml")


@pytest.mark.parametrize(
    ("page", "options"),
    [
        ("journal.md", JournalSettings),
        ("mqtt-python.md", MqttOptions),
        ("clients.md", SmqClientOptions),
        ("hub-api.md", HubOptions),
    ],
)
def test_the_manual_shows_the_options(page: str, options: type) -> None:
    assert manual_of(options) in (resources.files("smqrt") / "help" / page).read_text("utf-8")
