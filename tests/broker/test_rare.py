"""Attributes that few objects of a class use."""

from __future__ import annotations

from smqrt.broker.rare import Rare


class Values:
    __slots__ = ("colour", "size")

    def __init__(self) -> None:
        self.colour: str | None = None
        self.size = 0


class Thing:
    __slots__ = ("rare",)
    no_rare = Values()
    colour = Rare[str | None]()
    size = Rare[int]()

    def __init__(self) -> None:
        self.rare = self.no_rare


def test_a_rare_attribute_takes_memory_when_it_is_set() -> None:
    thing, other = Thing(), Thing()
    assert (thing.colour, thing.size) == (None, 0)
    thing.colour, thing.size = None, 0
    assert thing.rare is Thing.no_rare
    thing.size += 2
    thing.colour = "red"
    assert (thing.colour, thing.size) == ("red", 2)
    assert other.rare is Thing.no_rare
    assert (other.colour, other.size, Values().size) == (None, 0, 0)
    thing.colour = None
    assert (thing.colour, thing.size) == (None, 2)
    thing.size = 0
    assert thing.rare is Thing.no_rare
