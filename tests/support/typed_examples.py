"""The Python examples of the manual and of app_preload/, as modules for type checkers.

The examples have few annotations, since they are short. A reader who checks types writes them: here they are added, so
that `--strict` applies to everything. The table of the manual (python-api, "Type checkers") has the same types.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPOSITORY

HELP = REPOSITORY / "smqrt" / "help"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# (\S+/\S+\.py)(, added at the end)?$")

EXCLUDED = {
    "asyncio/pieces": "imports FastAPI, which the tests do not install",
    "devices/pieces": "programs for MicroPython",
    "duckdb/plant/now.py": "pyarrow has no annotations, and those of duckdb say that `sql` may return None",
    "mqtt-python/thermo/run.py": "`mqtt, err = connect()`, as in Lua: callbacks use a variable that may be None",
    "python-api/site/.preload.py": "imports the reader's Django site",
}
"""Examples that are not checked, and why."""

PARAMETERS = {
    "request": "_app.Request",
    "relpath": "str",
    "message": "_hub.Message",
    "credentials": "bytes",
    "info": "_hub.Info",
    "peer": "_hub.Peer",
    "ptid": "int",
    "tid": "int",
    "subtid": "int",
    "mqtt": "_hub.MqttAttributes | None",
    "topic": "str",
    "payload": "bytes",
    "prop": "_mqtt.Props",
    "cpt": "int",
    "environ": "dict[str, _typing.Any]",
}
"""Types of parameters without an annotation, by their names. Others are Any."""
PARAMETERS_OF = {
    "asyncio/aio/calculator.py": {"message": "_aio.Message"},
    "asyncio/aio/sensor.py": {"message": "_aio.Message"},
    "mqtt-python/thermo/create.py": {"payload": "bytearray"},
    "python-api/live/.preload.py": {"message": "str | bytes"},
    "app_preload/telemetry/.preload.py": {"message": "dict[str, _typing.Any]"},
}
"""Those of one example."""
FRAMES = {"source", "publish", "table", "alert", "view", "stateful", "reference"}
"""Decorators of functions whose parameters are DataFrames."""
PRELUDE = """
import typing as _typing
from pyspark.sql import DataFrame as _DataFrame
from smqrt import aio as _aio, app as _app, hub as _hub, mqtt as _mqtt
"""

_SPARK = "from pyspark.sql import SparkSession, functions as F\n\nspark = SparkSession.builder.getOrCreate()\n"
BEFORE_PIECES = {
    "format-smq": _SPARK,
    "pipeline-state": _SPARK,
    "mqtt-python": "from smqrt.mqtt import MqttClient\n\nclient = MqttClient('127.0.0.1')\n",
    "pipelines": "from pyspark.sql import functions as F\nfrom smqrt.pipeline import publish\n",
    "slow-consumers": "from smqrt import hub\n",
}
"""What the pieces of a page use without an import."""


@dataclass
class Example:
    """One module of a reader.

    Attributes:
        name: page and file, or the file in the tree, for messages.
        module: the file to write for the checkers; unique, except for modules that others import.
        source: with annotations.
    """

    name: str
    module: str
    source: str


def examples() -> Iterator[Example]:
    """Yield each file of each page, the other pieces of a page as one module, and the applications of the tree."""
    for page in sorted(HELP.rglob("*.md")):
        files = {f"{page.stem}/pieces": BEFORE_PIECES.get(page.stem, "")}
        for text in BLOCK.findall(page.read_text("utf-8")):
            found = FILE.match(text.partition("\n")[0])
            name = f"{page.stem}/{found[1]}" if found else f"{page.stem}/pieces"
            files[name] = files.get(name, "") + text
        if files[f"{page.stem}/pieces"] == BEFORE_PIECES.get(page.stem, ""):
            del files[f"{page.stem}/pieces"]
        yield from (_example(name, source) for name, source in files.items() if name not in EXCLUDED)
    for file in sorted((REPOSITORY / "app_preload").rglob("*.py")):
        yield _example(str(file.relative_to(REPOSITORY)), file.read_text("utf-8"))


def _example(name: str, source: str) -> Example:
    """Return the module; one beside a `.preload.py` keeps its name, by which others import it."""
    stem = Path(name).stem
    is_imported = stem in ("store", "functions", "nodes", "relay")
    module = stem if is_imported else re.sub(r"\W+", "_", "example/" + name.removesuffix(".py"))
    tree = ast.parse(source)
    _annotate(tree, PARAMETERS | PARAMETERS_OF.get(name, {}))
    has_future = source.lstrip().startswith("from __future__")
    at = next((n for n, one in enumerate(tree.body) if not _is_head(one)), 0)
    tree.body[at:at] = ast.parse(PRELUDE).body
    assert not has_future or at
    return Example(name, f"{module}.py", ast.unparse(ast.fix_missing_locations(tree)) + "\n")


def _is_head(node: ast.stmt) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _annotate(tree: ast.AST, parameters: dict[str, str]) -> None:
    """Add the annotations that functions lack."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = {ast.unparse(one.func) for one in node.decorator_list if isinstance(one, ast.Call)}
        other = "_DataFrame" if names & FRAMES else "_typing.Any"
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in every:
            if argument and argument.annotation is None and argument.arg != "self":
                argument.annotation = ast.Constant(parameters.get(argument.arg, other))
        if node.returns is None:
            node.returns = ast.Constant("None" if node.name == "__init__" else other)
