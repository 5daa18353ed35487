"""Decorators leave a declaration and change nothing; a wrong option is one sentence with file and line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline import alert, expect, publish, reference, source, table, view
from smqrt.pipeline.api import Expectation, Template, declaration_of, milliseconds, spark_duration


def test_importing_is_light() -> None:
    heavy = (
        "import smqrt.pipeline, sys; print([n for n in ('pyspark', 'pyarrow', 'gevent', 'lupa') if n in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", heavy], text=True).strip() == "[]"


def test_function_stays_plain() -> None:
    @publish(to="double/{n}")
    def double(number: int) -> int:
        return number * 2

    assert double(21) == 42
    assert double.__name__ == "double"


def test_source() -> None:
    @source(topics="site1/#", json="temp double", watermark="10 seconds")
    def readings(df: Any) -> Any:
        return df

    found = declaration_of(readings)
    assert found is not None
    assert (found.name, found.kind, found.inputs, found.is_query) == ("readings", "source", (), False)
    assert found.options["topics"] == ("site1/#",)
    assert found.options["include_pipeline"] is False
    assert found.where.startswith(__file__)


def test_inputs_are_parameters() -> None:
    @table("silver/x", partition_by="date")
    def silver(readings: Any, devices: Any, scale: float = 2.0) -> Any:
        return readings

    found = declaration_of(silver)
    assert found is not None
    assert found.inputs == ("readings", "devices")
    assert found.options["partition_by"] == ("date",)
    assert found.is_query


def test_expectations_in_order_above_and_below() -> None:
    @expect("a > 0")
    @source()
    @expect("b > 0", on_fail="dead_letter:dlq/b", name="positive")
    @expect("c > 0", on_fail="fail")
    def readings(df: Any) -> Any:
        return df

    found = declaration_of(readings)
    assert found is not None
    assert found.expectations == [
        Expectation("a > 0", "drop", "", "a > 0"),
        Expectation("b > 0", "dead_letter", "dlq/b", "positive"),
        Expectation("c > 0", "fail", "", "c > 0"),
    ]


def test_expect_alone_is_a_view() -> None:
    @expect("a > 0")
    def good(readings: Any) -> Any:
        return readings

    found = declaration_of(good)
    assert found is not None
    assert (found.kind, found.inputs) == ("view", ("readings",))


def test_dead_letter_topic_in_two_spellings() -> None:
    one = expect("a > 0", on_fail="dead_letter:dlq/a")(lambda readings: readings)
    other = expect("a > 0", on_fail="dead_letter", topic="dlq/a")(lambda readings: readings)
    assert declaration_of(one).expectations == declaration_of(other).expectations  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: source(topic="a"), "@source has no option 'topic'; did you mean 'topics'? its options are topics, "),
        (lambda: publish(to="a", every="1 s"), "@publish has no option 'every'; its options are to, subtopic, mode"),
        (lambda: view(to="a"), "@view has no option 'to'; it has no options."),
        (lambda: source(topics=[]) and source(topics=[1]), "topics=[1] must be a string or a list of strings."),
        (lambda: source(watermark="soon"), "watermark: 'soon' is not a duration; write a number and a unit"),
        (lambda: source(max_rows=0), "max_rows=0 must be an integer above 0."),
        (lambda: source(include_pipeline="yes"), "include_pipeline='yes' must be True or False."),
        (lambda: source(dead_letter="dlq"), "@source has dead_letter= but no json="),
        (lambda: publish(to=""), "to='' must be a string that is not empty."),
        (lambda: publish(to="a/{b"), "to: 'a/{b' has a brace without a column"),
        (lambda: publish(to="a/{}"), "to: 'a/{}' has a brace without a column"),
        (lambda: publish(to="a", mode="overwrite"), "mode='overwrite' must be one of 'append', 'update', 'complete'."),
        (lambda: publish(to="a", trigger="often"), "trigger: 'often' is not a duration"),
        (lambda: alert(to="a", key="device"), "@alert needs a condition that raises it: when=, absent= or rate="),
        (lambda: expect("a", on_fail="panic"), "on_fail='panic' must be one of 'drop', 'dead_letter', 'fail'."),
        (lambda: expect("a", on_fail="dead_letter"), "use on_fail='dead_letter:TOPIC', 'drop' or 'fail'."),
        (lambda: expect("a", on_fail="drop", topic="dlq"), "on_fail='drop' and topic='dlq' don't match"),
        (lambda: reference("d.csv", header=True), "@reference has no option 'header'; its options are path, schema."),
    ],
)
def test_wrong_options(decorate: Any, message: str) -> None:
    with pytest.raises(PipelineError) as caught:
        decorate()
    assert str(caught.value).startswith(f"{__file__}:")
    assert message in str(caught.value)


def test_two_kinds() -> None:
    with pytest.raises(PipelineError, match=r"both is a @table and a @publish; use a second function"):

        @publish(to="a")
        @table("b")
        def both(readings: Any) -> Any:
            return readings


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 0, "has no parameter; its parameters name its inputs"),
        (lambda *frames: 0, "has the parameter frames; give each input a plain name"),
    ],
)
def test_wrong_parameters(function: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        publish(to="a")(function)


def test_source_takes_one_frame() -> None:
    with pytest.raises(PipelineError, match="has 2 parameters; a @source has one, the DataFrame"):
        source()(lambda one, two: one)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200 ms", 200),
        ("10 seconds", 10_000),
        ("1 second", 1000),
        ("1.5 minutes", 90_000),
        ("2h", 7_200_000),
        ("1 d", 86_400_000),
    ],
)
def test_durations(text: str, expected: int) -> None:
    assert milliseconds(text) == expected
    assert spark_duration(text) == f"{expected} milliseconds"


@pytest.mark.parametrize("text", ["", "10", "seconds", "-1 s", "1 fortnight", 5])
def test_no_durations(text: Any) -> None:
    with pytest.raises(PipelineError, match="is not a duration"):
        milliseconds(text)


def test_template() -> None:
    assert Template("a/{b}/{{c}}").parts == [
        (False, "a/"),
        (True, "b"),
        (False, "/"),
        (False, "{"),
        (False, "c"),
        (False, "}"),
    ]
    assert Template("a/{window.start}").columns == ["window.start"]
    for wrong in ("{", "a}b", "{ }"):
        with pytest.raises(PipelineError):
            Template(wrong)
