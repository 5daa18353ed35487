"""Stateful operators of a query, read from Spark's analyzed plan.

Spark compares the types of a checkpoint's state, but not its meaning: `count` and `max`, or windows of three and of
five seconds, have the same types. A description of the operators is therefore stored beside the checkpoint (see
`changes`). It has the names of source columns, without Spark's expression ids and the names of result columns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError
from smqrt.pipeline import jvm
from smqrt.pipeline.api import Declaration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SOURCE_ALIAS = "_smqrt_source_"
"""Prefix of the alias that `Graph` gives the frame of a source. The plan below it parses messages, and another version
of this package may parse them differently."""

GROUP, DISTINCT, DISTINCT_WITHIN, JOIN, CUSTOM, LIMIT = "groupBy", "dropDuplicates", "dedupe", "join", "state", "limit"
_KINDS = {
    "Aggregate": GROUP,
    "Distinct": DISTINCT,
    "Deduplicate": DISTINCT,
    "DeduplicateWithinWatermark": DISTINCT_WITHIN,
    "Join": JOIN,
    "GlobalLimit": LIMIT,
    "FlatMapGroupsWithState": CUSTOM,
    "FlatMapGroupsInPandasWithState": CUSTOM,
    "TransformWithState": CUSTOM,
    "TransformWithStateInPandas": CUSTOM,
    "TransformWithStateInPySpark": CUSTOM,
}
_SHOWN = {DISTINCT_WITHIN: "dropDuplicatesWithinWatermark", CUSTOM: "a state by key"}
_WATERMARK = "spark.watermarkDelayMs"
_TIME_WINDOW, _SESSION_WINDOW = "spark.timeWindow", "spark.sessionWindow"
_MAX_LENGTH = 200
"""The maximum number of characters of an expression. A longer expression is cut, with a hash of the whole."""
_IGNORED = re.compile(r"#\d+L?(?:-T\d+ms)?|, Some\([\w/+:-]*\)")
"""Spark's expression ids, and the time zone of the session."""
_SLIDE, _LENGTH, _SHIFT = (
    re.compile(r"% (\d+)\)"),
    re.compile(r"\+ (\d+)\), LongType"),
    re.compile(r"LongType\) - (\d+)\) %"),
)
_GAP = re.compile(r"cast\(([^()]+) as interval\)")
_WINDOW_OF = re.compile(r"(?:session_)?window\(([\w.]+), [^()]*\)$")
_PART_OF_WINDOW = ", and take window.start of the result"
_UNITS_US = (
    (86_400_000_000, "day"),
    (3_600_000_000, "hour"),
    (60_000_000, "minute"),
    (1_000_000, "second"),
    (1000, "millisecond"),
    (1, "microsecond"),
)


@dataclass(frozen=True)
class Operator:
    """A stateful operator of a query.

    Attributes:
        kind: GROUP or another constant of this module.
        keys: the keys of the state, in order, as functions of source columns.
        values: the state of each key: aggregates, the condition of a join, the clock of timers.
        watermark: names of the source columns with a watermark that it reads; the delay of a watermark may change.
        unbounded: keys with which Spark never removes state; None if Spark removes it, or if the state is limited.
        lost: the keys in `unbounded` that are computed from a column with a watermark, by the name of the column.
        rate: the expression of an @alert whose latest values are stored.
    """

    kind: str
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    watermark: tuple[str, ...] = ()
    unbounded: tuple[str, ...] | None = None
    lost: dict[str, str] = field(default_factory=dict)
    rate: str = ""

    def description(self) -> dict[str, Any]:
        """Return the description beside a checkpoint, as JSON."""
        found: dict[str, Any] = {"kind": self.kind, "keys": [*self.keys], "values": [*self.values]}
        return found | {"watermark": [*self.watermark], "rate": self.rate}


def operators(frame: DataFrame) -> list[Operator]:
    """Return the stateful operators of a streaming frame, from the result to the sources."""
    return list(_Plan(jvm.analyzed_plan(frame)).operators())


def operators_of(frame: DataFrame, declaration: Declaration) -> list[Operator] | None:
    """Return the operators of a query's frame; None when this version of Spark does not show them.

    Args:
        frame: the result of the query.
        declaration: the query.

    Raises:
        PipelineError: it publishes final rows, and no row is ever final, although its source has a watermark.
    """
    try:
        found = operators(frame)
    except Exception as error:
        if jvm.is_of_gateway(error):  # the plan of another version of Spark
            return None
        raise
    if declaration.options["mode"] == "append" and (why := never_final(found)):
        raise PipelineError(f"{declaration.where}: {declaration.name}: {why}")
    rate = declaration.options.get("rate")
    return [replace(each, rate=rate.partition(" per ")[0]) if rate and each.kind == CUSTOM else each for each in found]


def changes(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[str]:
    """Return the changes between two lists of `Operator.description`, "old → new"; empty when the state is compatible.

    The delay of a watermark may change, and a watermark may be added or removed: the state means the same.
    """
    if [one["kind"] for one in before] != [one["kind"] for one in now]:
        old_kinds, new_kinds = (
            " and ".join(f"{_SHOWN.get(one['kind'], one['kind'])}({', '.join(one['keys'])})" for one in descriptions)
            or "no state"
            for descriptions in (before, now)
        )
        return [f"{old_kinds} → {new_kinds}"]
    found: list[str] = []
    for old, new in zip(before, now, strict=True):
        for part in ("keys", "values"):
            was, now_is = list(old[part]), list(new[part])
            if sorted(was) != sorted(now_is) and len(was) == len(now_is):
                found += [f"{one} → {other}" for one, other in zip(was, now_is, strict=True) if one != other]
            elif was != now_is:  # another order, or another number
                found.append(f"{', '.join(was) or 'nothing'} → {', '.join(now_is) or 'nothing'}")
        if old.get("rate") and new.get("rate") and old["rate"] != new["rate"]:
            found.append(f"rate of {old['rate']} → rate of {new['rate']}")
        if old["watermark"] and new["watermark"] and old["watermark"] != new["watermark"]:
            found.append(f"watermark on {', '.join(old['watermark'])} → on {', '.join(new['watermark'])}")
    return found


def endless(found: Sequence[Operator], mode: str) -> str:
    """Return a warning when state grows without bound; empty otherwise, or if the output mode needs the whole state.

    Args:
        found: the operators.
        mode: "append", "update" or "complete".
    """
    for each in found if mode != "complete" else ():
        if each.unbounded is not None and not (mode == "append" and each.kind == GROUP):  # which Spark rejects
            return f"its state grows without bound: {_without_watermark(each)}"
    return ""


def never_final(found: Sequence[Operator]) -> str:
    """Return why groups are never final, which mode "append" needs; empty when they are, or when Spark reports it."""
    for each in found:
        if each.kind == GROUP and each.watermark and (each.unbounded is not None or not each.keys):
            return f"mode='append' publishes only final rows, and no row becomes final: {_without_watermark(each)}"
    return ""


def _without_watermark(operator: Operator) -> str:
    shown = _SHOWN.get(operator.kind, operator.kind)
    if operator.lost:
        names = ", ".join(name if name == made else f"{name} ({made})" for name, made in operator.lost.items())
        on = ", ".join(operator.watermark)
        return (
            f"{shown} has no key with the watermark, which {on} has and {names} has lost; "
            f"{_remedy(operator)} itself{_PART_OF_WINDOW if operator.kind == GROUP else ''}."
        )
    keys = f"by {', '.join(operator.unbounded)}" if operator.unbounded else "without a key"
    if operator.kind == JOIN:
        return (
            f"the join of two streams {keys} has no condition on times with a watermark; give each @source a "
            "watermark=, and the join a condition on both times."
        )
    if not operator.watermark:
        return f"{shown} {keys} has no watermark; give the @source a watermark=, and {_remedy(operator)}."
    return f"{shown} {keys} has no key with the watermark; {_remedy(operator)}."


def _remedy(operator: Operator) -> str:
    if operator.kind == DISTINCT:
        return f"write dropDuplicatesWithinWatermark, or add {_column(operator)}"
    time = next((found[1] for key in operator.keys if (found := _WINDOW_OF.match(key))), None)
    if time is not None and not operator.lost:
        return f"set it on the time of the windows: event_time={time!r} on the @source"
    return f'group by F.window("{_column(operator)}", …)'


def _column(operator: Operator) -> str:
    """Return a column with the watermark; the time of arrival if there is none."""
    return operator.watermark[0].rpartition(".")[2] if operator.watermark else "ts"


class _Plan:
    """A plan of Spark, accessed through py4j.

    Args:
        root: its LogicalPlan.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._nodes = list(_nodes(root))
        self._defined: dict[int, Any] = {}
        self._texts: dict[int, str] = {}
        self._marked: dict[int, frozenset[str]] = {}
        self._sources: set[str] = set()

    def operators(self) -> Iterator[Operator]:
        if not any(node.nodeName() in _KINDS for node in self._nodes):
            return  # each column below costs several calls of the JVM, and most queries keep no state
        self._sources = {name for node in self._nodes if (name := _source_of(node))}
        for node in reversed(self._nodes):  # from the sources to the result
            self._define(node)
        needed = {_id(one) for one in _list(self._root.output())}
        for node in self._nodes:
            needed |= _used(node, needed)
            if (
                node.isStreaming()
                and (kind := _KINDS.get(node.nodeName()))
                and (made := self._operator(node, kind, needed))
            ):
                yield made

    def _operator(self, node: Any, kind: str, needed: set[int]) -> Operator | None:
        # A watermark is declared in its own node, or below the alias of a source.
        below = [each for each in _nodes(node) if each.nodeName() == "EventTimeWatermark" or _source_of(each)]
        marked = [one for each in below for one in filter(_is_marked, _list(each.output()))]
        watermark = tuple(sorted({name for one in marked for name in self._watermarks(one)}))
        if kind == GROUP:
            return self._group(node, needed, watermark)
        if kind == JOIN:
            return self._join(node, watermark)
        if kind == CUSTOM:
            if node.nodeName() == "TransformWithStateInPySpark":
                keys = _list(_list(node.children())[0].output())[: node.groupingAttributesLen()]
            else:
                keys = _list(node.groupingAttributes())
            is_older = node.nodeName().startswith("FlatMapGroups")
            clock = [f"timers: {(node.timeout() if is_older else node.timeMode()).toString()}"]
            if node.nodeName() == "FlatMapGroupsInPandasWithState":  # Spark knows the type of its state
                clock.append(str(node.stateType().simpleString()))
            return Operator(kind, self._texts_of(keys), tuple(clock), watermark)
        if kind == LIMIT:
            return Operator(kind, watermark=watermark)
        keys = _list(node.output() if node.nodeName() == "Distinct" else node.keys())
        texts = self._texts_of(keys)
        open_ended = kind == DISTINCT and not any(map(_is_marked, keys))
        return Operator(
            kind, texts, (), watermark, texts if open_ended else None, self._lost(keys) if open_ended else {}
        )

    def _group(self, node: Any, needed: set[int], watermark: tuple[str, ...]) -> Operator:
        keys = _list(node.groupingExpressions())
        results = [one for one in _list(node.aggregateExpressions()) if _id(one) in needed]
        values = dict.fromkeys(f"{self._text(one)} {_type(one)}" for each in results for one in _aggregates(each))
        texts = self._texts_of(keys)
        # Without keys there is one group; with a watermark on a key, Spark removes old groups.
        if not keys or any(map(_is_marked, keys)):
            return Operator(GROUP, texts, tuple(values), watermark)
        names = {
            self._text(one.child()): str(one.name()) for one in _list(node.aggregateExpressions()) if _is_alias(one)
        }
        return Operator(GROUP, texts, tuple(values), watermark, texts, self._lost(keys, names))

    def _join(self, node: Any, watermark: tuple[str, ...]) -> Operator | None:
        sides = [node.left(), node.right()]
        if not all(side.isStreaming() for side in sides):
            return None  # a join with a table keeps no state
        condition = [node.condition().get()] if node.condition().isDefined() else []
        texts = tuple(map(self._text, condition))
        used = {_id(one) for each in condition for one in _references(each) if _is_marked(one)}
        bounded = all(used & {_id(one) for one in _list(side.output())} for side in sides)
        kind = str(node.joinType().toString())
        return Operator(JOIN, texts, (kind,), watermark, None if bounded else texts)

    def _lost(self, keys: Sequence[Any], names: dict[str, str] | None = None) -> dict[str, str]:
        """Return the keys that are computed from a column with a watermark and have no watermark."""
        texts = {self._text(one): one for one in keys if self._watermarks(one)}
        named = {text: (names or {}).get(text) or str(one.sql()).replace("`", "") for text, one in texts.items()}
        return {named[text]: text for text in texts}

    # ---- Expressions as functions of source columns

    def _define(self, node: Any) -> None:
        """Record the columns that a node computes; those of a source by their names."""
        if name := _source_of(node):
            for one in _list(node.output()):
                own = str(one.name())
                self._texts[_id(one)] = f"{name}.{own}" if len(self._sources) > 1 else own
                self._marked[_id(one)] = frozenset([self._texts[_id(one)]] if _is_marked(one) else [])
            return
        kind, found = node.nodeName(), list[tuple[int, Any]]()
        if kind in ("Project", "Aggregate"):
            named = _list(node.projectList() if kind == "Project" else node.aggregateExpressions())
            found = [(_id(one), one.child()) for one in named if _is_alias(one)]
        elif kind == "Expand":  # of overlapping windows; its projections differ only in the shift
            pairs = zip(_list(node.output()), _list(node.projections().apply(0)), strict=True)
            found = [(_id(one), made) for one, made in pairs if not _is_attribute(made) or _id(made) != _id(one)]
        elif kind == "Generate":
            found = [(_id(one), node.generator()) for one in _list(node.generatorOutput())]
        elif kind == "Union":  # its columns are those of its first child
            pairs = zip(_list(node.output()), _list(_list(node.children())[0].output()), strict=True)
            found = [(_id(one), made) for one, made in pairs if _id(made) != _id(one)]
        for number, expression in found:
            self._defined.setdefault(number, expression)

    def _texts_of(self, expressions: Sequence[Any]) -> tuple[str, ...]:
        texts = [(self._text(one), one) for one in expressions]
        is_window = ("window(", "session_window(")  # whose text has no type
        return tuple(text if text.startswith(is_window) else f"{text} {_type(one)}" for text, one in texts)

    def _text(self, expression: Any) -> str:
        if _is_attribute(expression):
            return self._text_of_attribute(expression)
        text = str(expression.toString())
        for one in _references(expression):
            shown, definition = str(one.toString()), self._text_of_attribute(one)
            # The text of an attribute ends with its id: `n#1` is not a part of `n#12`.
            text = definition.join(re.split(re.escape(shown) + r"(?!\d)", text))
        text = _IGNORED.sub("", text)
        if len(text) <= _MAX_LENGTH:
            return text
        return f"{text[: _MAX_LENGTH // 2]}…{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def _text_of_attribute(self, attribute: Any) -> str:
        number = _id(attribute)
        if number not in self._texts:
            self._texts[number] = str(attribute.name())  # in case its definition refers to itself
            made = self._defined.get(number)
            if made is not None:
                self._texts[number] = self._window(attribute, made) or self._text(made)
        return self._texts[number]

    def _window(self, attribute: Any, made: Any) -> str:
        metadata = attribute.metadata()
        is_time, is_session = metadata.contains(_TIME_WINDOW), metadata.contains(_SESSION_WINDOW)
        if not (is_time or is_session):
            return ""
        text = str(made.toString())
        times = ", ".join(dict.fromkeys(map(self._text, _references(made))))
        if is_session:
            gap = _GAP.search(text)
            return f"session_window({times}, {gap[1]})" if gap else ""
        slide, length, shift = (each.search(text) for each in (_SLIDE, _LENGTH, _SHIFT))
        if not slide or not length:
            return ""
        parts = [times, _duration(length[1])]
        if slide[1] != length[1]:
            parts.append(_duration(slide[1]))
        if shift and shift[1] != "0":
            parts.append(f"from {_duration(shift[1])}")
        return f"window({', '.join(parts)})"

    def _watermarks(self, expression: Any) -> frozenset[str]:
        """Return the source columns with a watermark from which an expression is computed."""
        result: frozenset[str] = frozenset()
        for attribute in [expression] if _is_attribute(expression) else _references(expression):
            number = _id(attribute)
            if number not in self._marked:
                self._marked[number] = frozenset()  # in case its definition refers to itself
                made = self._defined.get(number)
                found = self._watermarks(made) if made is not None else frozenset()
                own = frozenset([self._text_of_attribute(attribute)] if _is_marked(attribute) else [])
                self._marked[number] = found or own
            result |= self._marked[number]
        return result


# ---- Access to Scala's objects


def _list(sequence: Any) -> list[Any]:
    return [sequence.apply(at) for at in range(sequence.size())]


def _nodes(root: Any) -> Iterator[Any]:
    """Yield the nodes of a plan, down to the frames of sources."""
    yield root
    if not _source_of(root):
        for child in _list(root.children()):
            yield from _nodes(child)


def _source_of(node: Any) -> str:
    if node.nodeName() != "SubqueryAlias":
        return ""
    alias = str(node.alias())
    return alias.removeprefix(SOURCE_ALIAS) if alias.startswith(SOURCE_ALIAS) else ""


def _class(expression: Any) -> str:
    return str(expression.getClass().getSimpleName())


def _is_attribute(expression: Any) -> bool:
    return _class(expression) == "AttributeReference"


def _is_alias(expression: Any) -> bool:
    return _class(expression) == "Alias"


def _is_marked(expression: Any) -> bool:
    return _is_attribute(expression) and bool(expression.metadata().contains(_WATERMARK))


def _id(named: Any) -> int:
    return int(named.exprId().id())


def _type(expression: Any) -> str:
    return str(expression.dataType().simpleString())


def _references(expression: Any) -> list[Any]:
    found, each = [], expression.references().iterator()
    while each.hasNext():
        found.append(each.next())
    return found


def _aggregates(expression: Any) -> Iterator[Any]:
    if _class(expression) == "AggregateExpression":
        yield expression
        return
    for child in _list(expression.children()):
        yield from _aggregates(child)


def _used(node: Any, needed: set[int]) -> set[int]:
    """Return the columns that a node reads for its needed results. Spark drops other results, including aggregates."""
    if node.nodeName() == "Project":
        made = [one for one in _list(node.projectList()) if _id(one) in needed]
    elif node.nodeName() == "Aggregate":
        return {_id(one) for each in _list(node.expressions()) for one in _references(each)}
    else:
        made = _list(node.expressions())
        if node.nodeName() in ("Distinct", "Union"):
            return {_id(one) for child in _list(node.children()) for one in _list(child.output())}
    return {_id(one) for each in made for one in _references(each)}


def _duration(micros: str) -> str:
    unit_us, unit = next((us, name) for us, name in _UNITS_US if int(micros) % us == 0)
    count = int(micros) // unit_us
    return f"{count} {unit}{'' if count == 1 else 's'}"
