"""Which of several classes take options that are given together, and which options none of them takes.

given    slices=4, reproducible=True, unit=100, stagez=2
A        has slices, reproducible               made
B        has slices, reproducible, unit         refuses: slices= has no meaning ...
nobody   has stagez                             which is wrong
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from fshard.errors import FshardError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Taker(Generic[Made]):
    """A class whose instances are to be made of options, and what is given of these where nobody says anything."""

    kind: type[Made]
    usual: Mapping[str, Any]

    def own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what it is made of: those options that it has."""
        return {**self.usual, **{name: x for name, x in given.items() if name in names_of(self.kind)}}

    def made(self, given: Mapping[str, Any]) -> Made:
        """Return an instance, or raise what it says itself."""
        return self.kind(**self.own(given))

    def refusal(self, given: Mapping[str, Any]) -> str:
        """Return why it cannot be made, "" if it can."""
        try:
            self.made(given)
        except FshardError as error:
            return reason(error)
        return ""


def takers_of(usual: Iterable[tuple[type[Made], Mapping[str, Any]]], given: Mapping[str, Any]) -> list[Taker[Made]]:
    """Return takers that are made of different options, if these are given."""
    found: list[Taker[Made]] = []
    for taker in (Taker(*pair) for pair in usual):
        if (taker.kind, taker.own(given)) not in [(one.kind, one.own(given)) for one in found]:
            found.append(taker)
    return found


def names_of(kind: Any) -> set[str]:
    """Return the options that a dataclass has."""
    return {one.name for one in fields(kind)}


def reason(error: FshardError) -> str:
    """Return what an error says, without the one word of who says it.

    >>> reason(FshardError("Kept: size is below 0.")), reason(FshardError("It is small. Say so: size=1"))
    ('size is below 0', 'It is small. Say so: size=1')
    """
    return re.sub(r"^[\w=]+: ", "", str(error).rstrip("."))


def wrong_for_all(takers: Sequence[Taker[Any]], given: Mapping[str, Any], apart: Sequence[str]) -> list[str]:
    """Return what is wrong with options that nobody has, or that none of those who have it takes, alone or with the others.

    Args:
        takers: the classes.
        given: the options.
        apart: names that are no options, though classes have them.

    >>> @dataclass
    ... class Kept:
    ...     size: int = 0
    ...     def __post_init__(self):
    ...         if self.size < 0:
    ...             raise FshardError("Kept: size is below 0.")
    >>> wrong_for_all([Taker(Kept, {})], {"size": -1, "color": 3}, ())
    ['there is no color=; there are size=', 'size is below 0']
    """
    names = sorted({name for taker in takers for name in names_of(taker.kind)} - {*apart})
    strange = ", ".join(f"{name}=" for name in given if name not in names)
    told = [f"there is no {strange}; there are {', '.join(f'{name}=' for name in names)}"] if strange else []
    for name in (name for name in given if name in names):
        its = [taker for taker in takers if name in names_of(taker.kind)]
        if all(taker.refusal(given) for taker in its):
            alone = [taker.refusal({name: given[name]}) for taker in its]
            told += alone[:1] if all(alone) else []
    return [*dict.fromkeys(told)]
