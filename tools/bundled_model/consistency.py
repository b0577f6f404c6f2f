"""Check a story against the grammar: does one plot explain all of it, with one value per slot?

A story that passes is grammatical as far as the grammar is, keeps its names, nouns, pronouns and
things from beginning to end, and has two different characters.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from bundled_model.plot import CLOSINGS, OPENINGS, Plot
from bundled_model.plots import PLOTS

Bindings = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A template as a regular expression; group `slot_0` holds the value of the first slot."""

    pattern: re.Pattern[str]
    slots: tuple[str, ...]


def is_consistent(story: str) -> bool:
    """Return whether some plot tells `story` word for word with one value for each slot."""
    return any(_is_told_by(plot, story) for plot in PLOTS)


def _is_told_by(plot: Plot, story: str) -> bool:
    readings: set[tuple[int, Bindings]] = {(0, ())}
    for ways in (OPENINGS, *plot.beats, plot.lessons):
        readings = {
            following
            for position, bindings in readings
            for way in ways
            for following in _read(_compile(way), story, position, bindings)
        }
    endings = [*readings]
    for position, bindings in readings:
        for way in CLOSINGS:
            endings += _read(_compile(way), story, position, bindings)
    return any(position >= len(story) and _has_sound_cast(b) for position, b in endings)


def _read(
    template: Template, story: str, position: int, bindings: Bindings
) -> Iterator[tuple[int, Bindings]]:
    """Yield where reading goes on and with which bindings, if `template` stands at `position`."""
    match = template.pattern.match(story, position)
    if match is None:
        return
    values = dict(bindings)
    for index, slot in enumerate(template.slots):
        value = match.group(f"slot_{index}")
        name = slot.lower().removeprefix("a_")
        if slot[0].isupper() and name not in ("name", "hname"):
            value = value[0].lower() + value[1:]
        if values.setdefault(name, value) != value:
            return
    yield match.end(), tuple(sorted(values.items()))


@cache
def _compile(template: str) -> Template:
    slots: list[str] = []
    pattern = ""
    for index, part in enumerate(re.split(r"\{(\w+)\}", template)):
        if index % 2 == 0:
            pattern += re.escape(part)
            continue
        article = "[Aa]n? " if part.lower().startswith("a_") else ""
        pattern += f"{article}(?P<slot_{len(slots)}>[\\w' ]+?)"
        slots.append(part)
    return Template(re.compile(pattern + r"(?: |$)"), tuple(slots))


def _has_sound_cast(bindings: Bindings) -> bool:
    """Return whether both characters keep one gender and do not share a name or a noun."""
    values = dict(bindings)
    if values["name"] == values.get("hname") or values["noun"] == values.get("hnoun"):
        return False
    genders = ({"he": "he", "him": "him", "his": "his"}, {"he": "she", "him": "her", "his": "her"})
    return all(
        any(
            all(values.get(prefix + slot, pronoun) == pronoun for slot, pronoun in gender.items())
            for gender in genders
        )
        for prefix in ("", "h")
    )
