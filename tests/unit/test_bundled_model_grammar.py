"""The story grammar of the bundled model: deterministic, varied and consistent. No torch."""

import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bundled_model import phrases, words
from bundled_model.consistency import is_consistent
from bundled_model.conversation import (
    Document,
    SamplingConfig,
    listed_words,
    request_story,
    sample_document,
)
from bundled_model.grammar import (
    Character,
    invent_word,
    sample_sequel_world,
    sample_world,
    tell_long_story,
    tell_sequel,
    tell_story,
    with_article,
)
from bundled_model.plot import BRIDGES, CLOSINGS, OPENINGS
from bundled_model.plots import PLOTS
from bundled_model.plots_of_trouble import LOST


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Return 1000 documents, each from its own seed."""
    return [sample_document(random.Random(seed), SamplingConfig()) for seed in range(1000)]


def test_sample_document_repeats_itself_when_the_seed_is_equal(documents: list[Document]) -> None:
    again = [sample_document(random.Random(seed), SamplingConfig()) for seed in range(50)]
    assert again == documents[:50]


def test_sample_document_varies_when_the_seed_differs(documents: list[Document]) -> None:
    stories = {document[-1].content for document in documents if len(document[-1].content) > 200}
    long_answers = [document for document in documents if len(document[-1].content) > 200]
    assert len(stories) == len(long_answers)


def test_sample_document_leaves_no_slot_open(documents: list[Document]) -> None:
    text = " ".join(turn.content for document in documents for turn in document)
    assert not re.search(r"[{}<>]|  ", text)


def test_sample_document_alternates_user_and_assistant(documents: list[Document]) -> None:
    for document in documents:
        roles = [turn.role for turn in document if turn.role != "system"]
        assert roles in (["text"], ["user", "assistant"] * (len(roles) // 2))


def test_sample_document_never_contains_a_held_out_animal(documents: list[Document]) -> None:
    text = " ".join(turn.content for document in documents for turn in document).lower()
    found = set(re.findall(r"\w+", text)) & set(words.HELD_OUT_ANIMALS)
    assert not found


def test_word_lists_have_no_duplicates_and_no_held_out_animals() -> None:
    nouns = listed_words()
    assert len(set(nouns)) == len(nouns)
    assert not set(nouns) & set(words.HELD_OUT_ANIMALS)


def test_word_lists_are_varied() -> None:
    assert len(words.ANIMALS) >= 40
    assert len(words.PLACES) >= 30
    assert len(words.OBJECTS) >= 40
    assert not set(words.GIRL_NAMES) & set(words.BOY_NAMES)


@pytest.mark.parametrize("seed", range(40))
def test_tell_story_keeps_the_hero_when_a_world_is_given(seed: int) -> None:
    rng = random.Random(seed)
    hero = Character(noun="quokka", name="Zelda", gender="girl", trait="kind")
    story = tell_story(rng, sample_world(rng, hero))
    assert "quokka named Zelda" in story.replace("called", "named").replace(
        "Zelda was a kind quokka", "quokka named Zelda"
    )
    assert story.count("Zelda") + story.count("quokka") >= 4


@pytest.mark.parametrize("seed", range(40))
def test_sample_world_gives_two_different_characters(seed: int) -> None:
    world = sample_world(random.Random(seed))
    assert world.hero.noun != world.helper.noun
    assert world.hero.name != world.helper.name


@pytest.mark.parametrize("seed", range(40))
def test_tell_story_names_one_object_when_the_plot_is_about_an_object(seed: int) -> None:
    rng = random.Random(seed)
    world = replace(sample_world(rng), plot=LOST)
    told = set(re.findall(r"\w+", tell_story(rng, world))) & set(words.OBJECTS)
    assert told == {dict(world.details)["object"]}


@pytest.mark.parametrize("seed", range(40))
def test_is_consistent_accepts_a_story_of_the_grammar(seed: int) -> None:
    rng = random.Random(seed)
    assert is_consistent(tell_story(rng, sample_world(rng)))


def test_is_consistent_rejects_a_story_when_a_name_changes() -> None:
    rng = random.Random(5)
    hero = Character(noun="fox", name="Zelda", gender="girl", trait="kind")
    story = tell_story(rng, replace(sample_world(rng, hero), plot=LOST))
    opening, rest = story.split(".", maxsplit=1)
    assert "Zelda" in rest
    assert not is_consistent(opening + "." + rest.replace("Zelda", "Mila"))


@pytest.mark.parametrize("seed", range(20))
def test_sample_sequel_world_keeps_hero_and_place_and_changes_the_plot(seed: int) -> None:
    rng = random.Random(seed)
    world = sample_world(rng)
    sequel = sample_sequel_world(rng, world)
    assert sequel.hero == world.hero
    assert dict(sequel.details)["place"] == dict(world.details)["place"]
    assert sequel.plot is not world.plot
    assert sequel.helper.name != world.helper.name


def test_tell_story_is_short_and_tell_long_story_is_longer() -> None:
    rng = random.Random(7)
    for _ in range(100):
        world = sample_world(rng)
        assert 45 <= len(tell_story(rng, world).split()) <= 140
        assert 90 <= len(tell_long_story(rng, world).split()) <= 280
        assert tell_sequel(rng, world)


def test_every_template_fills_when_any_world_is_given() -> None:
    world = sample_world(random.Random(1))
    templates = [*OPENINGS, *BRIDGES, *CLOSINGS]
    for plot in PLOTS:
        templates += [*(way for beat in plot.beats for way in beat), *plot.lessons, *plot.themes]
    templates += [*phrases.AGAIN_ABOUT, *phrases.CONTINUE]
    templates += [text for pair in phrases.STORY_QUESTIONS for text in pair]
    for template in templates:
        assert "{" not in world.fill(template)


def test_fill_raises_key_error_when_a_slot_is_unknown() -> None:
    with pytest.raises(KeyError, match="weather"):
        sample_world(random.Random(1)).fill("The {weather} was fine.")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("fox", "a fox"),
        ("owl", "an owl"),
        ("unicorn", "a unicorn"),
        ("umbrella", "an umbrella"),
        ("honest robot", "an honest robot"),
    ],
)
def test_with_article_follows_the_sound(word: str, expected: str) -> None:
    assert with_article(word) == expected


@pytest.mark.parametrize("noun", ["fox", "giraffe"])
def test_request_story_names_the_noun(noun: str) -> None:
    for seed in range(30):
        assert noun in request_story(random.Random(seed), noun)


def test_invent_word_gives_lower_case_letters_and_rarely_repeats() -> None:
    rng = random.Random(3)
    invented = [invent_word(rng) for _ in range(1000)]
    assert all(re.fullmatch(r"[a-z]{3,16}", word) for word in invented)
    assert len(set(invented)) > 950
