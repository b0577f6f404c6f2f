"""What a story shape is, and the sentences that every shape shares.

Slots: `name`, `noun`, `trait`, `he`, `him`, `his` are the hero's; the same words with a leading `h`
(`hname`, `hhe`, ...) are the helper's. A capital first letter asks for a capitalised value and a
leading `a_` for the value with its indefinite article.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Plot:
    """One story shape; beats, lessons and themes list several ways to say it.

    A theme is how a user asks for this plot ("... a fox who lost a kite").
    """

    name: str
    beats: tuple[tuple[str, ...], ...]
    lessons: tuple[str, ...]
    themes: tuple[str, ...]


OPENINGS: Final[tuple[str, ...]] = (
    "Once upon a time, {a_trait} {noun} named {name} lived {place}.",
    "Once upon a time, there was {a_trait} {noun} named {name} who lived {place}.",
    "Long ago, {a_trait} {noun} named {name} lived {place}.",
    "There once was {a_trait} {noun} called {name} who lived {place}.",
    "{name} was {a_trait} {noun} who lived {place}.",
    "Far away, {place}, there lived {a_trait} {noun} named {name}.",
)

BRIDGES: Final[tuple[str, ...]] = (
    "But that was not the end of the story.",
    "But the adventures of {name} were not over.",
    "Soon the {noun} had another adventure.",
)

CLOSINGS: Final[tuple[str, ...]] = (
    "The end.",
    "And that is the end of the story.",
    "From that day on, {name} and {hname} were best friends.",
    "That night, the {noun} slept very well.",
    "And {name} the {noun} lived happily ever after.",
    "And {name} never forgot that day.",
)
