"""The rules of the tree: who may import whom, what stays out of which layer, how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "smqrt"
ORDER = (
    "errors + printable + former_modules, process, settings + wire, workers + crypto, auth, broker, cluster + loop, "
    "transport + child_processes, smq + mail + acme, clients, "
    "cluster.nats + http + wsgi + client + aio + mqtt + mqtt3c, "
    "mqttc + gunicorn, cluster.engines + journal + manual, hub + server.restart, apps.python, app, apps.lua, "
    "server + apps, operations, operations.console, server.applications, server.runtime, pipeline, cli, __main__"
)
"""From the bottom to the top; what stands together may not import each other."""
BEHIND_A_FACADE = {"smqrt.apps.python.application": "smqrt.app"}
"""Each application gets a copy of `smqrt.app` of its own, so the module that makes it imports the façade above."""
IN_THE_HUB = ("durability", "writer", "recorder", "service", "listing", "announcer", "mqtt_columns")
"""The modules of the journal that run inside a hub; the others are its core, which Spark's processes load."""
LAYERS = [layer.replace(" + ", " ") for layer in ORDER.split(", ")]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 750


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, without a look at what is in them: `ast.walk` takes as long as to parse the text."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import; `from a import b` gives a.b."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in statements(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def layer(dotted: str) -> str:
    """Returns the layer of `smqrt.cluster.nats.client`, which is cluster.nats; empty for the package itself."""
    parts = (dotted.split(".") + [""])[1:]
    return next((two for two in [".".join(parts[:2])] if two in RANK), parts[0])


def dotted_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def place(path: Path) -> str:
    return layer(dotted_name(path))


Rule = Callable[[Path], None]


def for_each_module(rule: Rule) -> Callable[[], None]:
    """Makes one test of a rule: a test for each rule and each module would be thousands. It names all who break it."""

    @wraps(rule)
    def test() -> None:
        broken: list[str] = []
        for module in MODULES:
            try:
                rule(module)
            except AssertionError as error:
                broken.append(str(error).partition("\nassert ")[0])
        assert not broken, "\n".join(broken)

    del test.__wrapped__  # type: ignore[attr-defined]  # else pytest looks for a fixture with the name of its argument
    return test


@for_each_module
def test_imports_point_down(module: Path) -> None:
    here, name_here = place(module), dotted_name(module)
    if not here:
        return
    assert here in RANK, f"{module} belongs to no layer; the layers are {ORDER}"
    for line, name in imported(module):
        there = layer(name)
        if name.startswith("smqrt.") and there in RANK and there != here and BEHIND_A_FACADE.get(name_here) != name:
            assert RANK[there] < RANK[here], f"{module}:{line} imports {name}: imports point one way, {ORDER}"


@for_each_module
def test_wire_and_broker_are_pure(module: Path) -> None:
    if place(module) not in ("wire", "broker", "cluster") or module in KERNELS:
        return
    for line, name in imported(module):
        assert name.split(".")[0] not in ("gevent", "greenlet", "lupa", "socket", "_socket", "ssl", "time", "random"), (
            f"{module}:{line} imports {name}: wire, broker and cluster know no gevent, no Lua, no sockets and no clock"
        )


KERNELS = (
    PACKAGE / "wire" / "kernels.py",
    PACKAGE / "journal" / "columns.py",
    PACKAGE / "smq" / "forwarder.py",
)
"""The loops that are compiled by LuaJIT, each with a twin where that is missing."""


@for_each_module
def test_lupa_has_few_doors(module: Path) -> None:
    if place(module) == "apps.lua" or module in KERNELS:
        return
    for line, name in imported(module):
        assert name.split(".")[0] != "lupa", f"{module}:{line}: only smqrt/apps/lua and the kernels import lupa"


WITHOUT_GEVENT = ("aio", "clients.aio")
"""What asyncio programs import; `tests/clients/aio/test_imports.py` looks at all they load."""


@for_each_module
def test_the_asyncio_client_knows_no_gevent(module: Path) -> None:
    if dotted_name(module).startswith(tuple(f"smqrt.{one}" for one in WITHOUT_GEVENT)):
        for line, name in imported(module):
            assert name.split(".")[0] not in ("gevent", "greenlet"), f"{module}:{line}: no {name} here"


LUPAS_INSIDE = PACKAGE / "apps" / "lua" / "lupa_internals.py"
"""Where Lua's C interface is used beside lupa, with the reason."""


@for_each_module
def test_lupa_is_used_by_its_own_interface(module: Path) -> None:
    if place(module) == "apps.lua" and module != LUPAS_INSIDE:
        for line, name in imported(module):
            assert name.split(".")[0] != "ctypes", f"{module}:{line}: only {LUPAS_INSIDE.name} looks into lupa"


ALONE = ("errors", "process", "settings", "printable", "pipeline", "journal", "")


@for_each_module
def test_the_journal_core_and_pipelines_stand_alone(module: Path) -> None:
    if place(module) != "pipeline" and (place(module) != "journal" or module.stem in IN_THE_HUB):
        return
    for line, name in imported(module):
        allowed = layer(name) in ALONE or not name.startswith("smqrt.")
        assert allowed, f"{module}:{line} imports {name}: pipelines and the journal core know no hub"
        not_here = ("gevent", "greenlet") if module in KERNELS else ("gevent", "greenlet", "lupa")
        assert name.split(".")[0] not in not_here, f"{module}:{line}: no {name} here"
        assert not name.startswith(tuple(f"smqrt.journal.{one}" for one in IN_THE_HUB)), f"{module}:{line}: {name}"


@for_each_module
def test_pyspark_has_one_door(module: Path) -> None:
    if place(module) != "pipeline":
        for line, name in imported(module):
            assert name.split(".")[0] != "pyspark", f"{module}:{line}: only smqrt/pipeline imports pyspark"


SPARKS_INSIDE = PACKAGE / "pipeline" / "jvm.py"
"""Where the private names of pyspark are, each with its reason."""


def own_names(nodes: list[ast.AST]) -> set[str]:
    """What a module defines, sets on its objects, or calls the columns of rows."""
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    fields = (node.target for node in nodes if isinstance(node, ast.AnnAssign))
    tuples = (item for node in nodes if isinstance(node, ast.Tuple) for item in node.elts)
    columns = {item.value for item in tuples if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    return defined | columns | {node.attr for node in stored} | {n.id for n in fields if isinstance(n, ast.Name)}


def private_uses(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of private names that the module itself doesn't define, and of the way to Spark's JVM."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    own = own_names(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "pyspark.java_gateway" in node.value:
            yield node.lineno, node.value
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] == "py4j" or "java_gateway" in parts or (parts[0] == "pyspark" and parts[-1].startswith("_")):
            yield line, name


@for_each_module
def test_private_names_of_spark_are_in_one_module(module: Path) -> None:
    if place(module) == "pipeline" and module != SPARKS_INSIDE:
        others = [(line, name) for line, name in private_uses(module) if name not in ("_getframe", "_exit")]
        assert others == [], f"{module}: only {SPARKS_INSIDE.name} uses private names of pyspark"


def test_private_names_of_spark_are_found() -> None:
    found = {name for _, name in private_uses(SPARKS_INSIDE)}
    assert {"_jvm", "_jdf", "_jsc", "_jsparkSession", "_ensure_initialized", "_gateway"} <= found
    assert "py4j.protocol.Py4JJavaError" in found


@for_each_module
def test_only_the_command_line_patches(module: Path) -> None:
    if place(module) != "cli":
        assert "monkey.patch_" not in module.read_text("utf-8"), f"{module}: the package never monkey-patches"


@for_each_module
def test_no_file_is_two_ideas(module: Path) -> None:
    lines = len(module.read_text("utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{module} has {lines} lines: more than {LONGEST_FILE} want to be two files"
