"""The reference pages and the code have the same names: methods, options, callbacks and attributes, in both directions.

What `create` of hubs takes, their methods, and tables of options that are made of the code are compared elsewhere
(`test_manual.py`, `settings/test_server_settings.py`).
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

from smqrt import app, hub
from smqrt.aio import Observation, Subscription
from smqrt.aio import SmqClient as AsyncioClient
from smqrt.app import Request, Response
from smqrt.client import SmqClient
from smqrt.clients.mqtt import documented
from smqrt.hub import cluster, conn, mtl
from smqrt.hub.peer import Peer, PeerSocket
from smqrt.mqtt import MqttClient
from smqrt.smq.messages import Message
from tests.conftest import REPOSITORY

HELP, LIB = REPOSITORY / "smqrt/help", REPOSITORY / "smqrt/apps/lua/lib"
Names = set[str]


def part(page: str, begin: str = "# ", end: str = "\x00") -> str:
    """A page from the line that begins so, up to another one."""
    text = "\n" + (HELP / f"{page}.md").read_text("utf-8")
    assert f"\n{begin}" in text, f"{page} has no {begin!r}"
    return text.partition(f"\n{begin}")[2].partition(f"\n{end}")[0]


def first_columns(text: str) -> str:
    """The first column of each row of the tables."""
    return "\n".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))


def in_code(text: str, pattern: str = r"@?(?:\w+\.)?(\w+)") -> Names:
    """The names at the beginning of what is marked as code."""
    return set(re.findall(rf"`{pattern}(?=[`(.\[ ,=])", text)) - {"with"}


def lua(file: str, pattern: str) -> Names:
    return set(re.findall(pattern, (LIB / file).read_text("utf-8"), re.MULTILINE))


def public(*classes: type, internal: str = "") -> Names:
    """The public names of classes, but for what only this package calls."""
    return {name for one in classes for name in dir(one) if not name.startswith("_")} - set(internal.split())


def parameters(*functions: Any) -> Names:
    """The keyword-only parameters."""
    found = [one for function in functions for one in signature(function).parameters.values()]
    return {one.name for one in found if one.kind is one.KEYWORD_ONLY}


# ---- clients

AIO = part("asyncio", "| method | meaning |", "| subscription, observation |")
AIO_RECEIVERS = part("asyncio", "| subscription, observation |", "The options are")
PYTHON_CLIENT = part("clients", "| method | meaning |", "| option |")
LUA_CLIENT = part("clients", "## Lua", "## The command line")
LUA_CLIENT_OPTIONS = {"uid", "info", "ping", "pong", "timeout", "shark"} | {
    "proxy", "proxyport", "socks", "proxyuser", "proxypass",
}  # fmt: skip
"""Those that the code takes from lists of names."""

# ---- clusters

MODULES = part("cluster", "## The modules", "The first argument of `conn.create`")
LINKS = part("cluster", "## Options of links", "With `ping`, a node")


def modules(column: int) -> str:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", MODULES, re.MULTILINE)
    return "\n".join(row[0] if column == 0 or row[1].startswith("the same") else row[1] for row in rows)


def methods(text: str, name: str) -> Names:
    return set(re.findall(rf"\b{name}[.:](\w+)[({{]", text))


# ---- MQTT

MQTT_LUA = part("mqtt-lua")
LUA_OPTIONS = part("mqtt-lua", "`op`:", "`properties` are")
PYTHON_MQTT = part("mqtt-python", "## Messages", "You can call all methods")
DOCUMENTED = part("mqtt-python", "| function | protocol | returns |", "## Limits")
HOOKS = "on_auth on_deferred on_answer on_connack on_disconnect on_end on_left_out on_message on_room on_wake shutdown"


def lua_mqtt_options() -> Names:
    text = (LIB / "ba/mqtt.lua").read_text("utf-8")
    copied = re.search(r"local COPIED_OPTIONS <const> = \{(.*?)\}", text, re.DOTALL)
    older = re.search(r"local OLDER_NAMES <const> = \{(.*?)\}", text)
    known = re.search(r"local known_options = \{(.*?)\}", text)
    assert copied
    assert older
    assert known
    names = re.findall(r"\w+", older[1]) + re.findall(r"(\w+) = true", known[1])
    return set(re.findall(r'"(\w+)"', copied[1])) | set(names)


def lua_options_documented() -> Names:
    of_connect = re.search(r"number of a refusal\. `op`: (.*?)\. `mqtt:run", MQTT_LUA, re.DOTALL)
    assert of_connect
    names = in_code(LUA_OPTIONS) | in_code(of_connect[1])
    return names - {"publish"}  # what the option queuefull is about


# ---- applications in Python

APP = part("python-api")
REQUEST = first_columns(part("python-api", "| of a request |", "A method may wait"))
RESPONSE = first_columns(part("python-api", "| of a response |", "A completed response"))
PEER = part("hub-api", "`peer` has", "`sock` is")
SOCK = part("hub-api", "`sock` is", "What `onclose` gets")

SAME: dict[str, tuple[Names, Names]] = {
    "clients.md, methods in Python": (
        public(SmqClient, internal="on_end") | {"end"},
        in_code(first_columns(PYTHON_CLIENT)) - {"SmqClient"},
    ),
    "asyncio.md, methods": (
        public(AsyncioClient) | {"end"},
        in_code(first_columns(AIO), r"@?(?:await )?(?:\w+\.)?(\w+)") - {"SmqClient"},
    ),
    "asyncio.md, subscriptions": (public(Subscription, Observation), in_code(first_columns(AIO_RECEIVERS))),
    "clients.md, methods in Lua": (
        lua("smq/client.lua", r"^(?:function )?methods\.(\w+)"),
        methods(first_columns(LUA_CLIENT), "smq"),
    ),
    "clients.md, callbacks in Lua": (
        lua("smq/client.lua", r"self\.(on\w+)"),
        in_code(LUA_CLIENT.partition("Fields: ")[2].partition("\n")[0]),
    ),
    "clients.md, options in Lua": (
        lua("smq/client.lua", r"\bop\.(\w+)") | LUA_CLIENT_OPTIONS,
        in_code(LUA_CLIENT.partition("Options: ")[2].partition("[as for httpc]")[0]),
    ),
    "cluster.md, links in Lua": (lua("smq/mtl.lua", r"^function mtl\.(\w+)"), methods(modules(0), "mtl")),
    "cluster.md, channels in Lua": (lua("smq/mtl.lua", r"^function channel\.(\w+)"), methods(modules(0), "channel")),
    "cluster.md, smq.conn in Lua": (lua("smq/conn.lua", r"^function conn\.(\w+)"), methods(modules(0), "conn")),
    "cluster.md, smq.cluster in Lua": (
        lua("smq/cluster.lua", r"^function cluster\.(\w+)"),
        methods(modules(0), "cluster"),
    ),
    "cluster.md, options of smq.conn in Lua": (
        lua("smq/conn.lua", r"\bop\.(\w+)"),
        set(re.findall(r"\w+", re.findall(r"port \[, \{(.*?)\}", MODULES)[0])),
    ),
    "cluster.md, links in Python": (
        public(mtl.Mtl) - {"close", "shutdown"},
        (methods(modules(1), "links") | methods(modules(1), "mtl")) - {"create", "server", "close", "shutdown"},
    ),
    "cluster.md, channels in Python": (public(mtl.Channel, internal="name"), methods(modules(1), "channel")),
    "cluster.md, smq.conn in Python": (
        public(conn.Conn, internal="close"),
        methods(modules(1), "conn") - {"create"},
    ),
    "cluster.md, smq.cluster in Python": (
        public(cluster.Cluster, internal="name") - {"number"},
        methods(modules(1), "cluster") - {"create"},
    ),
    "cluster.md, options in Python": (
        parameters(mtl.create, conn.create, cluster.create),
        set(re.findall(r"(\w+)=", modules(1)))
        | in_code("\n".join(re.findall(r"^\| .*? \| (.*?) \|", LINKS, re.M))) - {"the"}
        | {"keepalive", "keepintv"},
    ),
    "mqtt-lua.md, methods": (
        lua("ba/mqtt.lua", r"^function methods:(\w+)") | {"run"},
        methods(MQTT_LUA, "mqtt"),
    ),
    "mqtt-lua.md, options": (lua_mqtt_options(), lua_options_documented()),
    "mqtt-python.md, methods of MqttClient": (
        public(MqttClient, internal=HOOKS) | {"left_out", "end"},
        in_code(first_columns(PYTHON_MQTT)),
    ),
    "mqtt-python.md, functions": (
        {"create", "connect"},
        in_code(first_columns(DOCUMENTED.partition("| option |")[0])) - {"mqtt"},
    ),
    "mqtt-python.md, options of mqttc and mqtt3c": (
        set(documented.OPTIONS),
        in_code(first_columns(DOCUMENTED.partition("| option |")[2].partition("| method |")[0])),
    ),
    "mqtt-python.md, methods of mqttc and mqtt3c": (
        public(documented.Mqtt, documented.Mqtt3, internal="version") | {"sock"},
        in_code(first_columns(DOCUMENTED.partition("| method |")[2])),
    ),
    "hub-api.md, what a peer has": (
        {one.name for one in fields(Peer) if not one.name.startswith("_")} | public(Peer),
        in_code(PEER.replace("`tid2topic`", "")) | {"data", "node"},
    ),
    "hub-api.md, what a socket has": (
        public(PeerSocket, internal="etid tls transport"),
        in_code(SOCK),
    ),
    "hub-api.md, what a message has": (
        public(Message),
        set(
            re.findall(
                r"`(\w+)[`(]", part("hub-api", "`subscribe` as a decorator", "```python").partition("It has ")[2]
            )
        ),
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_names_of_the_code_and_of_the_page(what: str) -> None:
    code, page = SAME[what]
    assert code
    assert (sorted(code - page), sorted(page - code)) == ([], []), "not in the page; not in the code"


@pytest.mark.parametrize(("kind", "rows"), [(Request, REQUEST), (Response, RESPONSE)], ids=["request", "response"])
def test_what_python_api_shows_is_there(kind: type, rows: str) -> None:
    """Not the other way round: the server has more of these for itself."""
    source = inspect.getsource(kind)
    shown = in_code(rows.replace('query["a"]', "query"))
    assert len(shown) > 8
    assert [name for name in sorted(shown) if not hasattr(kind, name) and f"self.{name}" not in source] == []


def test_what_applications_import_is_in_python_api() -> None:
    text = APP + part("logins")
    assert [name for name in app.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_cluster_modules_of_python_have_lua_names() -> None:
    for file, owner, kinds in (
        ("mtl", "mtl", mtl.Mtl),
        ("mtl", "channel", mtl.Channel),
        ("conn", "conn", conn.Conn),
        ("cluster", "cluster", cluster.Cluster),
    ):
        names = lua(f"smq/{file}.lua", rf"^function {owner}\.(\w+)") - {"node"}  # Python: number
        assert names - public(kinds) == set(), owner


def test_every_callback_of_a_hub_has_a_type() -> None:
    callbacks = {name.lower() for name in hub.__all__ if inspect.isclass(getattr(hub, name)) and name.startswith("On")}
    options = set(signature(hub.create).parameters)
    variants = {
        "onmessage",
        "onmessagewithattributes",
        "onpublishwithattributes",
        "onclosewithreason",
        "onmqttgapwithnode",
    }
    assert callbacks - options - variants == set()
