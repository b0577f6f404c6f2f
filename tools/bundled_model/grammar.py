"""The story grammar: sample a world, then tell its story or any sentence about it.

Everything is a pure function of the `random.Random` passed in. A `World` fixes every name, thing
and place once, so what the request mentions and what the story tells cannot disagree.

Every noun has habits (the fox's usual name, place, plot, ...) which half of the choices follow. So
a model of these stories has a likeliest answer for each request, and not one for all of them.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from bundled_model import words
from bundled_model.plot import BRIDGES, CLOSINGS, OPENINGS, Plot
from bundled_model.plots import PLOTS

Gender = Literal["girl", "boy"]
Option = TypeVar("Option")


@dataclass(frozen=True, slots=True)
class Character:
    """Somebody in a story; `noun` says what they are ("fox")."""

    noun: str
    name: str
    gender: Gender
    trait: str

    def slots(self, prefix: str) -> dict[str, str]:
        """Return the slot values of this character, each slot name led by `prefix`."""
        he, him, his = ("she", "her", "her") if self.gender == "girl" else ("he", "him", "his")
        values = {
            "noun": self.noun,
            "name": self.name,
            "trait": self.trait,
            "he": he,
            "him": him,
            "his": his,
        }
        return {prefix + slot: value for slot, value in values.items()}


@dataclass(frozen=True, slots=True)
class World:
    """All that one story is about."""

    hero: Character
    helper: Character
    plot: Plot
    details: tuple[tuple[str, str], ...]

    def fill(self, template: str) -> str:
        """Return `template` with its slots replaced by this world's values.

        Raises `KeyError` for a slot that does not exist.
        """
        slots = {**self.hero.slots(""), **self.helper.slots("h"), **dict(self.details)}
        return re.sub(r"\{(\w+)\}", lambda match: _slot_value(match.group(1), slots), template)


def with_article(word: str) -> str:
    """Return `word` after the indefinite article that its spelling asks for."""
    if word.startswith(("uni", "use", "eu", "one")):
        return f"a {word}"
    return f"an {word}" if word.startswith((*"aeiou", "hones")) else f"a {word}"


def invent_word(rng: random.Random) -> str:
    """Return a pronounceable lower-case word; nearly always one that no list contains."""
    syllables = [
        rng.choice(words.ONSETS) + rng.choice(words.VOWELS) for _ in range(rng.choice((1, 2, 2)))
    ]
    if rng.random() < 0.2:
        syllables[0] = rng.choice("aeiou")
    ending = rng.choice(words.CODAS)
    if len(syllables) == 1 or rng.random() < 0.4:
        ending += rng.choice(words.ENDINGS)
    return "".join(syllables) + ending


def sample_noun(rng: random.Random) -> str:
    """Return a listed noun for a hero: mostly animals, sometimes people or things."""
    group = rng.choices((words.ANIMALS, words.PEOPLE, words.THINGS), weights=(6, 2, 1))[0]
    return rng.choice(group)


def sample_character(
    rng: random.Random, noun: str | None = None, taken: Sequence[Character] = ()
) -> Character:
    """Return a character whose noun (unless given) and name are not among `taken`."""
    if noun is None:
        taken_nouns = {character.noun for character in taken}
        noun = next(word for word in iter(lambda: sample_noun(rng), "") if word not in taken_nouns)
    gender = _sample_gender(rng, noun)
    names = words.GIRL_NAMES if gender == "girl" else words.BOY_NAMES
    taken_names = {character.name for character in taken}
    name = _pick(rng, noun, [name for name in names if name not in taken_names])
    return Character(noun, name, gender, _pick(rng, noun, words.TRAITS))


def sample_world(
    rng: random.Random, hero: Character | None = None, taken: Sequence[Character] = ()
) -> World:
    """Return a world around `hero` (sampled if None) whose helper is not among `taken`."""
    hero = hero or sample_character(rng, taken=taken)
    helper = sample_character(_habit_or_chance(rng, hero.noun), taken=(*taken, hero))
    search, search2 = _habit_or_chance(rng, hero.noun).sample(words.SEARCH_PLACES, 2)
    details = (
        ("place", _pick(rng, hero.noun, words.PLACES)),
        ("search", search),
        ("search2", search2),
        ("object", _pick(rng, hero.noun, words.OBJECTS)),
        ("color", _pick(rng, hero.noun, words.COLORS)),
        ("food", _pick(rng, hero.noun, words.FOODS)),
        ("fear", _pick(rng, hero.noun, words.FEARS)),
        ("noise", _pick(rng, hero.noun, words.NOISES)),
        ("game", _pick(rng, hero.noun, words.GAMES)),
        ("project", _pick(rng, hero.noun, words.PROJECTS)),
        ("skill", _pick(rng, hero.noun, words.SKILLS)),
    )
    return World(hero, helper, _pick(rng, hero.noun, PLOTS), details)


def tell_story(rng: random.Random, world: World) -> str:
    """Return the story of `world`: opening, beats, lesson and sometimes a closing."""
    return _join(world, [rng.choice(OPENINGS), *_plot_templates(rng, world.plot)])


def tell_sequel(rng: random.Random, world: World) -> str:
    """Return a further adventure in `world`, for a hero whom the reader already knows."""
    return _join(world, [rng.choice(BRIDGES), *_plot_templates(rng, world.plot)])


def tell_long_story(rng: random.Random, world: World) -> str:
    """Return a story of two adventures; the second has its own plot and helper."""
    first = [rng.choice(OPENINGS), *(rng.choice(beat) for beat in world.plot.beats)]
    sequel = sample_sequel_world(rng, world)
    return f"{_join(world, first)} {tell_sequel(rng, sequel)}"


def sample_sequel_world(rng: random.Random, world: World) -> World:
    """Return a world with the same hero and place, another plot and another helper."""
    sequel = sample_world(rng, hero=world.hero, taken=(world.helper,))
    place = dict(world.details)["place"]
    details = tuple({**dict(sequel.details), "place": place}.items())
    plot = rng.choice([plot for plot in PLOTS if plot is not world.plot])
    return World(sequel.hero, sequel.helper, plot, details)


def _plot_templates(rng: random.Random, plot: Plot) -> list[str]:
    templates = [rng.choice(beat) for beat in plot.beats]
    templates.append(rng.choice(plot.lessons))
    if rng.random() < 0.5:
        templates.append(rng.choice(CLOSINGS))
    return templates


def _join(world: World, templates: Sequence[str]) -> str:
    return " ".join(world.fill(template) for template in templates)


def _habit_or_chance(rng: random.Random, noun: str) -> random.Random:
    """Return, equally often, `rng` or a fresh generator that is always the same for `noun`."""
    return random.Random(f"habit of the {noun}") if rng.random() < 0.5 else rng


def _pick(rng: random.Random, noun: str, options: Sequence[Option]) -> Option:
    return _habit_or_chance(rng, noun).choice(options)


def _sample_gender(rng: random.Random, noun: str) -> Gender:
    if noun in words.GIRL_NOUNS:
        return "girl"
    if noun in words.BOY_NOUNS:
        return "boy"
    return _pick(rng, noun, ("girl", "boy"))


def _slot_value(slot: str, slots: dict[str, str]) -> str:
    is_capital = slot[0].isupper()
    slot = slot[0].lower() + slot[1:]
    value = with_article(slots[slot[2:]]) if slot.startswith("a_") else slots[slot]
    return value[0].upper() + value[1:] if is_capital else value
