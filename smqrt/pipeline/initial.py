"""`smqrt pipeline init`: a pipeline to start from, with rows to test it on."""

from __future__ import annotations

import json
import keyword
from pathlib import Path

from smqrt.errors import PipelineError
from smqrt.pipeline.testing import FOLDER

_PIPELINE = '''"""The mean temperature of each device and minute.

Devices publish to site1/...: {"device": "d1", "temp": 21.5}. Results are published to NAME/{device}.
"""

from pyspark.sql import functions as F

from smqrt.pipeline import expect, publish, source


@source(topics="site1/#", json="device string, temp double", watermark="10 seconds")
@expect("temp between -60 and 150", on_fail="drop")
def NAME_readings(rows):
    return rows


@publish(to="NAME/{device}", mode="update")
def NAME(NAME_readings):
    minute = F.window("ts", "1 minute").start.alias("minute")
    means = NAME_readings.groupBy("device", minute).agg(F.avg("temp").alias("mean"), F.count("*").alias("n"))
    return means.select("device", "minute", F.round("mean", 2).alias("mean"), "n")
'''
_ROWS = (
    ("12:00:01", "site1/hall", {"device": "d1", "temp": 20.0}),
    ("12:00:02", "site1/hall", {"device": "d2", "temp": 30.5}),
    ("12:00:31", "site1/hall", {"device": "d1", "temp": 21.0}),
    ("12:00:32", "site1/hall", {"device": "d2", "temp": 999}),
    ("12:00:33", "site1/hall", "no JSON"),
    ("12:01:10", "site1/hall", {"device": "d1", "temp": 22.25}),
    ("12:01:11", "site2/hall", {"device": "d3", "temp": 1.0}),
)
_MEANS = (("d1", "12:00", 20.5, 2), ("d1", "12:01", 22.25, 1), ("d2", "12:00", 30.5, 1))
_DAY = "2026-11-21T"


def make(folder: Path, name: str) -> list[Path]:
    """Makes a pipeline file, and the rows and the expected results of its test.

    Rows that are there already are kept: then the results are yours to look at, and to keep with `--update`.

    Args:
        folder: where pipelines lie, usually `<application>/pipelines`; made when it isn't there.
        name: of the file, and of the query in it.

    Returns:
        The files that were made.

    Raises:
        PipelineError: `name` can't be a function's name, the file is there already, or one can't be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith(("_", "test_")):
        raise PipelineError(f"{name!r} names a Python function too: take letters, digits and '_', as in per_minute.")
    files = {folder / f"{name}.py": _PIPELINE.replace("NAME", name)}
    if not list((folder / FOLDER).glob("*.jsonl")):
        files |= {folder / FOLDER / "messages.jsonl": _messages(), folder / FOLDER / f"{name}.json": _means(name)}
    for path in files:
        if path.exists():
            raise PipelineError(f"{path} is there already: choose another name.")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise PipelineError(f"{error.filename} can't be written: {error.strerror}.") from None
    return list(files)


def _messages() -> str:
    rows = ({"topic": topic, "ts": f"{_DAY}{time}Z", "payload": payload} for time, topic, payload in _ROWS)
    return "".join(json.dumps(row) + "\n" for row in rows)


def _means(name: str) -> str:
    """As `smqrt pipeline test --update` writes it."""
    rows = (
        {
            "topic": f"{name}/{device}",
            "payload": {"device": device, "minute": f"{_DAY}{minute}:00.000Z", "mean": mean, "n": n},
        }
        for device, minute, mean, n in _MEANS
    )
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
