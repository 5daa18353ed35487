"""The table of settings: one file, and every form made from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from inspect import signature
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from smqrt import hub
from smqrt.auth.service import accepted_logins
from smqrt.cli.serve import serve
from smqrt.cli.serve import sources as sources_of
from smqrt.clients.mqtt.connect import MqttOptions
from smqrt.clients.smq.connection import SmqClientOptions
from smqrt.errors import StartError
from smqrt.journal.settings import JournalSettings
from smqrt.operations.metrics import FORMER_NAMES as FORMER_METRICS
from smqrt.server import configuration
from smqrt.server.configuration import LiveSettings
from smqrt.settings import sources
from smqrt.settings.option_types import Path as SettingPath
from smqrt.settings.option_types import (
    choice,
    duration,
    environment_name,
    flag,
    group,
    named_settings_of,
    option,
    optional,
    options_of,
    options_table,
    schema,
    settings_manual,
    settings_of,
    tables,
    text,
    texts,
    value_at,
    whole,
)
from smqrt.settings.server_settings import AuthSettings, Settings, table
from smqrt.settings.sources import FORMER_NAMES, Sources, rows
from smqrt.smq.gevent_broker import HubOptions


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


def file(folder: Path, text: str) -> Path:
    path = folder / "smqrt.toml"
    path.write_text(text)
    return path


def test_precedence_is_flag_environment_file_mako_conf_default(tmp_path: Path) -> None:
    flags: dict[tuple[str, ...], object] = {("port",): 1}
    environment = {"SMQRT_PORT": "2", "SMQRT_HOST": "b", "SMQRT_PAGES__MANUAL": "off", "SMQRT_CERT": ""}
    path = file(tmp_path, 'port = 3\nhost = "c"\n\nhosts = "c"\n[pages]\nmanual = true\n')
    made = Sources(flags, environment, path, {"port": 4, "host": "d", "hosts": "d", "cert": "d"}, "mako.conf").read()
    found = made.settings
    assert (found.port, found.host, found.hosts, found.cert, found.pages.manual) == (1, "b", "c", "d", False)
    assert [row for row in rows(made) if row[2] != "default"] == [
        ("host", "b", "SMQRT_HOST"),
        ("port", 1, "--port"),
        ("cert", "d", "mako.conf"),
        ("hosts", "c", f"{path}, line 4"),
        ("pages.manual", False, "SMQRT_PAGES__MANUAL"),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\nprot = 80", r"smqrt.toml, line 2: prot is not a setting; did you mean port\?"),
        ("port 80", "smqrt.toml, line 1 is not valid TOML: Expected"),
        ("port = 80\nport = 81", "smqrt.toml, line 2: this name was set before"),
        ("[pages]\n# text\nmanuel = 1", r"line 3: pages.manuel is not a setting; did you mean pages.manual\?"),
        ("manual = true", r"line 1: manual is not a setting; did you mean pages.manual\?"),
        ("pages = true", r"line 1: pages is a table of settings: write \[pages\] and its settings below"),
        ('hosts = """\na"""\nport = "x"', "line 3: port must be a whole number from 0 to 65535, not 'x'"),
        ("pages.manual = 7", "line 1: pages.manual must be true or false, not 7"),
        ("[page]\nmanual = true", r"line 2: page.manual is not a setting; did you mean pages.manual\?"),
        ("[[port]]\nx = 1", r"line 1: port must be a whole number from 0 to 65535, not \[\{'x': 1\}\]"),
        ("x = " + "[" * 5000, "is not valid TOML"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        Sources(file=file(tmp_path, text)).read()


def test_a_missing_file_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't be read: No such file"):
        Sources(file=tmp_path / "smqrt.toml").read()


def test_wrong_variables_and_flags_are_named() -> None:
    with pytest.raises(StartError) as told:
        Sources({("drain_s",): "-1"}, {"SMQRT_PORT": "x", "SMQRT_RELOAD": "maybe"}).read()
    assert str(told.value).splitlines() == [
        "SMQRT_PORT: port must be a whole number from 0 to 65535, not 'x'.",
        "SMQRT_RELOAD: reload must be true or false, not 'maybe'.",
        "--drain-s: drain_s must be a number of at least 0, not '-1'.",
    ]


@dataclass(frozen=True)
class Door:
    """A table that users name."""

    port: int = option(1, whole(0), "Its port.")
    word: str = option("", text(), "A password.", secret=True, live=True)


@dataclass(frozen=True)
class Lock:
    """A table of words."""

    kind: str = option("yale", choice("yale", "abus"), "Its make.", live=True)


@dataclass(frozen=True)
class House:
    """A table with all there is."""

    size: int = option(1, whole(0), "How large.")
    after_s: float = option(1.0, duration(), "When.")
    names: tuple[str, ...] = option((), texts(), "Who.")
    word: str | None = option(None, optional(text()), "A password.", secret=True)
    lock: Lock = group(Lock, "A lock.")
    door: Mapping[str, Door] = tables(Door, "Doors.")


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> type[House]:
    for module in (sources, configuration):
        monkeypatch.setattr(module, "Settings", House)
    monkeypatch.setattr(sources, "table", lambda: tuple(settings_of(House)))
    monkeypatch.setattr(sources, "named_table", lambda: tuple(named_settings_of(House)))
    return House


def test_tables_that_users_name(house: type[House], tmp_path: Path) -> None:
    path = file(tmp_path, '[door.Main]\nport = 2\n[door."a/#"]\nword = "x"\n[door.plain]\n')
    environment = {"SMQRT_DOOR__MAIN__PORT": "3", "SMQRT_DOOR__BACK__PORT": "4"}
    environment |= {"SMQRT_NAMES": "a, b", "SMQRT_AFTER_S": "2m"}
    made = Sources({("lock", "kind"): "abus"}, environment, path).read()
    assert made.settings == House(  # type: ignore[comparison-overlap]  # stands for Settings here
        after_s=120, names=("a", "b"), lock=Lock("abus"),
        door={"Main": Door(3), "a/#": Door(word="x"), "plain": Door(), "back": Door(4)},
    )  # fmt: skip
    places = {name: place for name, _, place in rows(made) if name.startswith("door")}
    assert (places["door.Main.port"], places["door.a/#.word"]) == ("SMQRT_DOOR__MAIN__PORT", f"{path}, line 4")
    assert [value for name, value, _ in rows(made) if name == "door.a/#.word"] == ["********"]


def test_a_wrong_table_that_a_user_names(house: type[House], tmp_path: Path) -> None:
    with pytest.raises(StartError) as told:
        Sources(file=file(tmp_path, "[door.main]\nprot = 2\n[door.back]\nport = -1\n[door]\nport = 4\n")).read()
    assert [line.partition("smqrt.toml, ")[2] for line in str(told.value).splitlines()] == [
        "line 2: door.main.prot is not a setting; did you mean door.NAME.port?",
        "line 4: door.back.port must be a whole number of at least 0, not -1.",
        "line 6: door.port is not a setting; did you mean door.NAME.port?",
    ]


def test_secrets_may_stand_in_files(house: type[House], tmp_path: Path) -> None:
    secret = tmp_path / "word"
    secret.write_text("open sesame\n")
    made = Sources(environment={"SMQRT_WORD_FILE": str(secret), "SMQRT_DOOR__A__WORD_FILE": str(secret)}).read()
    assert (made.settings.word, made.settings.door["a"].word) == ("open sesame", "open sesame")  # type: ignore[attr-defined]
    for environment, sentence in (
        ({"SMQRT_WORD_FILE": "/nowhere"}, "SMQRT_WORD_FILE: /nowhere can't be read: No such file"),
        ({"SMQRT_WORD_FILE": "/dev/null", "SMQRT_WORD": "x"}, "SMQRT_WORD_FILE: SMQRT_WORD is set too"),
    ):
        with pytest.raises(StartError, match=sentence):
            Sources(environment=environment).read()


def test_a_wrong_secret_is_not_shown(house: type[House], tmp_path: Path) -> None:
    with pytest.raises(StartError, match="word must be a text, or nothing, not the value given"):
        Sources(file=file(tmp_path, "word = 12345")).read()


def test_the_schema_accepts_valid_and_refuses_invalid_values() -> None:
    for table_of in (Settings, House):
        Draft202012Validator.check_schema(schema(table_of))
    checked = Draft202012Validator(schema(House))
    right = {"size": 3, "after_s": "2m", "names": ["a"], "lock": {"kind": "abus"}, "door": {"x": {"port": 1}}}
    assert checked.is_valid(right)
    wrongs = {"size": -1}, {"sise": 1}, {"lock": {"kind": "x"}}, {"door": {"x": {"prot": 1}}}, {"after_s": "soon"}
    for wrong in wrongs:
        assert not checked.is_valid(wrong), wrong


def test_some_settings_change_while_the_server_runs(house: type[House], caplog: pytest.LogCaptureFixture) -> None:
    told: list[object] = []
    found = [House(size=2, lock=Lock("abus"), door={"a": Door(2)}), House(lock=Lock("abus"))]
    live = LiveSettings(House(), lambda line: None)  # type: ignore[arg-type]  # stands for Settings here
    live.read_with(lambda: found.pop(0), live.current)  # type: ignore[arg-type, return-value]
    live.watch(("size",), told.append)
    live.watch(("lock",), told.append)
    assert live.reload() is None
    assert told == [live.current] == [House(lock=Lock("abus"))]
    assert caplog.messages == ["settings that need a restart to change: door.a, size"]
    assert live.reload() is None
    assert len(told) == len(caplog.messages) == 1


def test_a_part_that_cannot_change_reports_it(house: type[House]) -> None:
    def refuse(_: object) -> None:
        raise StartError("no such lock")

    def wrong() -> Settings:
        raise StartError("line 3 is wrong")

    live = LiveSettings(House(), lambda line: None)  # type: ignore[arg-type]
    live.watch(("lock.kind",), refuse)
    live.read_with(lambda: House(lock=Lock("abus")), live.current)  # type: ignore[arg-type, return-value]
    assert live.reload() == "no such lock"
    live.read_with(wrong, live.current)
    assert live.reload() == "line 3 is wrong"


def test_the_line_about_accepted_clients() -> None:
    said = accepted_logins(AuthSettings(users="users", acl="rules", anonymous=True))
    assert said == "hubs accept: users, anonymous clients; rules of rules"
    assert accepted_logins(AuthSettings(jwt_key="key")) == "hubs accept: tokens; no rules"


@pytest.mark.parametrize(("former", "present"), FORMER_NAMES.items(), ids=map(".".join, FORMER_NAMES))
def test_a_former_name_works_and_warns_once(former: SettingPath, present: SettingPath, tmp_path: Path) -> None:
    old, new = ".".join(former), ".".join(present)
    value: object = "keys" if old == "key_file" else 12
    written = file(tmp_path, "".join(f"[{group}]\n" for group in former[:-1]) + f"{former[-1]} = {json.dumps(value)}\n")
    ways = (
        (Sources(file=written), f"{written}, line {len(former)}"),
        (Sources(environment={environment_name(former): str(value)}), environment_name(former)),
        (Sources({former: value}), flag(former)),
    )
    for source, place in ways:
        found = source.read()
        assert value_at(found.settings, present) == value
        assert found.warnings == (f"{place}: {old} is now {new}; the former name works for one release",)
        assert [row for row in rows(found) if row[2] != "default"] == [(new, value, place)]


def test_the_present_name_wins_over_the_former_one(tmp_path: Path) -> None:
    path = file(tmp_path, "[drain]\ntimeout_s = 1\nmost_s = 2\n")
    found = Sources({("drain", "most_s"): 3.0}, {"SMQRT_DRAIN__TIMEOUT_S": "4"}, path).read()
    assert found.settings.drain.timeout_s == 3  # a flag wins, by either name
    assert found.warnings[0].endswith(
        "line 3: drain.most_s is now drain.timeout_s, which is set too; this value is ignored"
    )
    assert len(found.warnings) == 2


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


def test_unknown_variables_are_reported() -> None:
    environment = {"SMQRT_PAGES_MANUAL": "1", "SMQRT_XYZZY": "1", "SMQRT_KERNELS": "1", "PATH": "x"}
    assert Sources(environment=environment).read().warnings == (
        "SMQRT_PAGES_MANUAL is not a setting; did you mean SMQRT_PAGES__MANUAL?",
        "SMQRT_XYZZY is not a setting; `smqrt help settings` lists them all.",
    )


def test_a_hub_takes_its_options_in_python() -> None:
    callbacks = [
        "authenticate",
        "permittop",
        "permitsubtop",
        "onconnect",
        "onclose",
        "onpublish",
        "ondrop",
        "onmsg",
        "onnode",
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
