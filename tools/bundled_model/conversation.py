"""Sample training documents: chats with a story model, and plain stories without a chat."""

import random
from dataclasses import dataclass, replace
from typing import Literal

from bundled_model import phrases, words
from bundled_model.grammar import (
    Character,
    World,
    invent_word,
    sample_character,
    sample_noun,
    sample_sequel_world,
    sample_world,
    tell_long_story,
    tell_sequel,
    tell_story,
)

Role = Literal["system", "user", "assistant", "text"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message; the role `text` marks a plain story that is not part of a chat."""

    role: Role
    content: str


Document = tuple[Turn, ...]
Exchange = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Shares of what a document contains; each a probability in [0, 1]."""

    plain_story_ratio: float = 0.08
    small_talk_ratio: float = 0.07
    system_prompt_ratio: float = 0.25
    follow_up_ratio: float = 0.22
    many_turns_ratio: float = 0.02
    invented_noun_ratio: float = 0.4
    invented_name_ratio: float = 0.4


def sample_document(rng: random.Random, config: SamplingConfig) -> Document:
    """Return one document; the same `rng` state and config give the same document."""
    if rng.random() < config.plain_story_ratio:
        return (Turn("text", tell_story(rng, sample_world(rng))),)
    turns: list[Turn] = []
    if rng.random() < config.system_prompt_ratio:
        turns.append(Turn("system", rng.choice(phrases.SYSTEM_PROMPTS)))
    for question, answer in _sample_exchanges(rng, config):
        turns += [Turn("user", question), Turn("assistant", answer)]
    return tuple(turns)


def request_story(rng: random.Random, noun: str) -> str:
    """Return a request that asks for a story about `noun` and about nothing else."""
    world = sample_world(rng, sample_character(rng, noun))
    return _sample_request(rng, world, phrases.PLAIN_SUBJECT)


def _sample_exchanges(rng: random.Random, config: SamplingConfig) -> list[Exchange]:
    if rng.random() < config.small_talk_ratio:
        exchanges = [_small_talk(rng)]
        if rng.random() < 0.3:
            exchanges.append(_sample_story(rng, config)[0])
        return exchanges
    exchange, world = _sample_story(rng, config)
    exchanges = [exchange]
    for _ in range(_sample_num_follow_ups(rng, config)):
        exchange, world = _follow_up(rng, config, world)
        exchanges.append(exchange)
    return exchanges


def _sample_num_follow_ups(rng: random.Random, config: SamplingConfig) -> int:
    draw = rng.random()
    if draw < config.many_turns_ratio:
        return rng.randint(4, 8)
    return rng.randint(1, 2) if draw < config.many_turns_ratio + config.follow_up_ratio else 0


def _sample_story(rng: random.Random, config: SamplingConfig) -> tuple[Exchange, World]:
    """Return a first request with its story, and the world that both are about."""
    kind = rng.choices(("plain", "subject", "named", "open", "long"), weights=(45, 25, 12, 8, 5))[0]
    if kind == "open":
        world = sample_world(rng)
        request = _fill(rng, world, rng.choice(phrases.OPEN_REQUESTS))
        return (request, tell_story(rng, world)), world
    world = sample_world(rng, _sample_hero(rng, config, is_named=kind == "named"))
    if kind == "long":
        lead = rng.choice(phrases.LONG_LEADS)
        request = _fill(rng, world, lead.replace("{subject}", phrases.PLAIN_SUBJECT))
        return (request, tell_long_story(rng, world)), world
    subjects = {"plain": (phrases.PLAIN_SUBJECT,), "subject": phrases.SUBJECTS}
    subject = rng.choice(subjects.get(kind, phrases.NAMED_SUBJECTS))
    if "{a_hnoun}" in subject and rng.random() < config.invented_noun_ratio:
        world = replace(world, helper=replace(world.helper, noun=invent_word(rng)))
    return (_sample_request(rng, world, subject), tell_story(rng, world)), world


def _sample_hero(rng: random.Random, config: SamplingConfig, *, is_named: bool) -> Character:
    is_invented = rng.random() < config.invented_noun_ratio
    hero = sample_character(rng, invent_word(rng) if is_invented else sample_noun(rng))
    if is_named and rng.random() < config.invented_name_ratio:
        return replace(hero, name=invent_word(rng).capitalize())
    return hero


def _sample_request(rng: random.Random, world: World, subject: str) -> str:
    lead = rng.choice(phrases.LEADS)
    if subject == phrases.PLAIN_SUBJECT and rng.random() < 0.04:
        return world.hero.noun
    request = _fill(rng, world, lead.replace("{subject}", subject))
    if "{name}" not in subject and rng.random() < 0.15:
        return request.lower()
    return request


def _fill(rng: random.Random, world: World, template: str) -> str:
    return world.fill(template.replace("<theme>", rng.choice(world.plot.themes)))


def _follow_up(rng: random.Random, config: SamplingConfig, world: World) -> tuple[Exchange, World]:
    """Return the next exchange after a story about `world`, and the world it leaves behind."""
    kind = rng.choices(
        ("again", "longer", "about", "continue", "question", "small_talk"),
        weights=(5, 3, 4, 4, 4, 2),
    )[0]
    if kind == "question":
        question, answer = rng.choice(phrases.STORY_QUESTIONS)
        return (world.fill(question), world.fill(answer)), world
    if kind == "small_talk":
        return _small_talk(rng), world
    if kind == "continue":
        sequel = sample_sequel_world(rng, world)
        return (_fill(rng, world, rng.choice(phrases.CONTINUE)), tell_sequel(rng, sequel)), sequel
    if kind == "about":
        told = sample_world(rng, _sample_hero(rng, config, is_named=False), taken=(world.hero,))
        return (told.fill(rng.choice(phrases.AGAIN_ABOUT)), tell_story(rng, told)), told
    hero = sample_character(rng, world.hero.noun, taken=(world.hero, world.helper))
    told = sample_world(rng, hero, taken=(world.hero, world.helper))
    if kind == "again":
        return (rng.choice(phrases.AGAIN), tell_story(rng, told)), told
    return (rng.choice(phrases.AGAIN_LONGER), tell_long_story(rng, told)), told


def _small_talk(rng: random.Random) -> Exchange:
    questions, answers = rng.choice(phrases.SMALL_TALK)
    return rng.choice(questions), rng.choice(answers)


def listed_words() -> tuple[str, ...]:
    """Return every listed noun that a story may be about; the held-out animals are not there."""
    return (*words.ANIMALS, *words.PEOPLE, *words.THINGS)
