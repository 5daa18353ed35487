"""The table of settings: one file, and every form made from it."""

from __future__ import annotations

import re
from importlib import resources
from inspect import signature

import pytest
from jsonschema import Draft202012Validator

from smqrt import hub
from smqrt.auth.service import accepted_logins
from smqrt.cli.serve import serve
from smqrt.cli.serve import sources as sources_of
from smqrt.clients.mqtt.connect import MqttOptions
from smqrt.clients.smq.options import SmqClientOptions
from smqrt.journal.settings import JournalSettings
from smqrt.operations.metrics import FORMER_NAMES as FORMER_METRICS
from smqrt.settings.option_types import Path as SettingPath
from smqrt.settings.option_types import (
    environment_name,
    flag,
    options_of,
    options_table,
    schema,
    settings_manual,
)
from smqrt.settings.server_settings import AuthSettings, Settings, table
from smqrt.settings.sources import FORMER_NAMES
from smqrt.smq.gevent_broker import HubOptions
from tests.settings.house import House


def test_spellings() -> None:
    tls_port = next(setting for setting in table() if setting.name == "tls_port")
    assert (flag(tls_port.path), environment_name(tls_port.path)) == ("--tls-port", "SMQRT_TLS_PORT")
    assert Settings().port == 9357


def test_the_manual_shows_the_table() -> None:
    page = (resources.files("smqrt") / "help" / "settings.md").read_text("utf-8")
    assert settings_manual(Settings) in page, "scripts/fix writes it"


def test_spellings_are_all_different() -> None:
    assert (
        len({flag(one.path) for one in table()}) == len({environment_name(one.path) for one in table()}) == len(table())
    )


def test_the_schema_accepts_valid_and_refuses_invalid_values() -> None:
    for table_of in (Settings, House):
        Draft202012Validator.check_schema(schema(table_of))
    checked = Draft202012Validator(schema(House))
    right = {"size": 3, "after_s": "2m", "names": ["a"], "lock": {"kind": "abus"}, "door": {"x": {"port": 1}}}
    assert checked.is_valid(right)
    wrongs = {"size": -1}, {"sise": 1}, {"lock": {"kind": "x"}}, {"door": {"x": {"prot": 1}}}, {"after_s": "soon"}
    for wrong in wrongs:
        assert not checked.is_valid(wrong), wrong


def test_the_line_about_accepted_clients() -> None:
    said = accepted_logins(AuthSettings(users="users", acl="rules", anonymous=True))
    assert said == "hubs accept: users, anonymous clients; rules of rules"
    assert accepted_logins(AuthSettings(jwt_key="key")) == "hubs accept: tokens; no rules"


def test_the_manual_lists_the_former_names() -> None:
    page = (resources.files("smqrt") / "help" / "upgrading.md").read_text("utf-8")
    rows = [(".".join(former), ".".join(present)) for former, present in FORMER_NAMES.items()]
    rows += sorted((former, present) for present, former in FORMER_METRICS.items())
    assert re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", page, re.MULTILINE) == rows


@pytest.mark.parametrize(("former", "present"), FORMER_NAMES.items(), ids=map(".".join, FORMER_NAMES))
def test_the_schema_marks_a_former_name_as_deprecated(former: SettingPath, present: SettingPath) -> None:
    found = schema(Settings, FORMER_NAMES)
    Draft202012Validator.check_schema(found)
    about, replaced = ({"properties": found["properties"]} for _ in range(2))
    for name in former:
        about = about["properties"][name]  # type: ignore[index, assignment]
    for name in present:
        replaced = replaced["properties"][name]  # type: ignore[index, assignment]
    assert about["deprecated"] is True
    assert f"`{'.'.join(present)}`" in str(about["description"])
    assert "default" not in about
    assert "deprecated" not in replaced
    good, bad = ("keys" if former == ("key_file",) else 12), -1
    for value, is_right in ((good, True), (bad, False)):
        document: object = value
        for name in reversed(former):
            document = {name: document}
        assert Draft202012Validator(found).is_valid(document) is is_right
        assert not Draft202012Validator(schema(Settings)).is_valid(document)


def test_a_command_takes_a_former_flag() -> None:
    context = serve.make_context("serve", ["--drain-most-s", "7"])
    assert sources_of(context.params)[0].read().settings.drain.timeout_s == 7
    assert "most-s" not in serve.get_help(context)


def test_a_hub_takes_its_options_in_python() -> None:
    callbacks = [
        "authenticate",
        "mqttauth",
        "permittop",
        "permitfilter",
        "permitsubtop",
        "onconnect",
        "onclose",
        "onpublish",
        "ondrop",
        "onmsg",
        "onnode",
        "onmqttgap",
        "log",
    ]
    others = {"options", "journal", *callbacks}
    assert set(options_of(HubOptions)) == set(signature(hub.create).parameters) - others


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
    assert options_table(options) in (resources.files("smqrt") / "help" / page).read_text("utf-8")
