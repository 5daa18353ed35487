"""What `run` runs: one plan for each query that was asked for, and one for each declaration's dead letters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from smqrt.pipeline import dead_letters
from smqrt.pipeline.api import DEFAULT_TRIGGER, Declaration
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.graph import Graph

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Plan:
    """One streaming query.

    Attributes:
        declaration: what it is; its name is the query's.
        root: the declaration of the catalog that it is made of; with dead letters another one.
        sources: names of the sources that it reads.
        make: gives its DataFrame.
        shared: it belongs to several queries; when another process runs it, that will do.
    """

    declaration: Declaration
    root: Declaration
    sources: list[str]
    make: Callable[[Graph], DataFrame]
    shared: bool = False

    @property
    def name(self) -> str:
        """The name of the query, of its folder and of its status."""
        return self.declaration.name

    @property
    def marks(self) -> dict[str, str]:
        """Under which name each source tells the journal how far the query is."""
        alone = len(self.sources) == 1
        return {source: self.name if alone else f"{self.name}.{source}" for source in self.sources}


def plans(catalog: Catalog, queries: list[Declaration]) -> list[Plan]:
    """Returns what to run so that these queries run, dead letters included."""
    found = [_plan(catalog, query) for query in queries]
    parts = {each.name: each for query in queries for each in catalog.walk(query)}
    return found + [_letters(catalog, each) for each in parts.values() if _has_letters(each)]


def _plan(catalog: Catalog, query: Declaration) -> Plan:
    return Plan(query, query, _sources(catalog, query), lambda graph: graph.frame(query))


def _has_letters(part: Declaration) -> bool:
    return bool(part.options.get("dead_letter")) or any(each.on_fail == "dead_letter" for each in part.expectations)


def _letters(catalog: Catalog, part: Declaration) -> Plan:
    """One query for a part's dead letters, however many queries read the part: each letter is published once."""
    options = {
        "to": "{topic}",
        "subtopic": None,
        "mode": part.options.get("mode", "append"),
        "trigger": DEFAULT_TRIGGER,
    }
    query = Declaration(
        f"{part.name}.dead_letters", "publish", part.function, part.inputs, options, [], part.file, part.line
    )
    make = partial(_make_letters, part)
    return Plan(query, part, _sources(catalog, part), make, shared=True)


def _make_letters(part: Declaration, graph: Graph) -> DataFrame:
    return dead_letters.letters(graph.rejected(part))


def _sources(catalog: Catalog, declaration: Declaration) -> list[str]:
    return [source.name for source in catalog.sources_of(declaration)]
