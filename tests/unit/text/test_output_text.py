"""The text of a sequence is the same in whatever chunks its tokens arrive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_client import (
    End,
    Finish,
    FinishReason,
    Piece,
    RequestTexts,
    SamplingParams,
    SequenceFinish,
    TextRules,
    Tokenizer,
    Tokens,
    Usage,
)
from splitserve_text import OutputText
from tests.support.models import tiny_tokenizers

TOKENIZER = Tokenizer.from_files({"tokenizer.json": tiny_tokenizers.byte_level().to_str().encode()})
VOCAB_SIZE = 406


def read(
    token_ids: Sequence[int], cuts: Sequence[int], rules: TextRules, min_tokens: int = 0
) -> tuple[str, int]:
    """The text, and how many tokens were taken, if they arrive cut at `cuts`."""
    text = OutputText(TOKENIZER.detokenizer(), rules, min_tokens)
    shown, taken = "", 0
    places = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    for start, end in itertools.pairwise(places):
        piece, num_read = text.push(token_ids[start:end])
        shown, taken = shown + piece, taken + num_read
    assert text.num_tokens == taken
    return shown + text.finish(), taken


@settings(deadline=None, max_examples=60)
@given(
    token_ids=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    place=st.integers(0, 200),
    length=st.integers(1, 4),
    is_included=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 5]),
)
def test_text_ends_at_the_same_token_however_tokens_arrive(
    token_ids: list[int],
    cuts: list[int],
    place: int,
    length: int,
    is_included: bool,
    min_tokens: int,
) -> None:
    whole = TOKENIZER.decode(token_ids)
    stop = whole[place % len(whole) :][:length] if whole else "x"
    rules = TextRules((stop,), is_included)
    shown, taken = read(token_ids, cuts, rules, min_tokens)
    assert (shown, taken) == read(token_ids, range(len(token_ids)), rules, min_tokens)
    if min_tokens == 0 and stop in whole:
        assert shown == whole[: whole.index(stop) + len(stop) * is_included]
        assert stop in TOKENIZER.decode(token_ids[:taken])
    assert read(token_ids, cuts, TextRules()) == (whole, len(token_ids))


@pytest.mark.parametrize(
    ("min_tokens", "num_taken"),
    # The token whose text the stop string is in is the last of `min_tokens`; the next one with that
    # text comes after them; none does.
    [(2, 3), (3, 7), (6, 7), (7, 8)],
)
def test_stop_string_is_looked_for_after_min_tokens(min_tokens: int, num_taken: int) -> None:
    token_ids = [TOKENIZER.encode(char, add_special_tokens=False)[0] for char in "abcdabcd"]
    shown, taken = read(token_ids, range(8), TextRules(("c",)), min_tokens)
    assert (shown, taken) == ("abcdabcd"[: num_taken - (num_taken < 8)], num_taken)


@pytest.mark.parametrize("stop_strings", [(), ("never",)])
def test_text_has_nothing_of_tokens_when_they_are_hidden(stop_strings: tuple[str, ...]) -> None:
    (fox,) = TOKENIZER.encode(" fox")
    token_ids = [*TOKENIZER.encode("the"), fox]
    hiding = TextRules(stop_strings, hidden_token_ids=frozenset({fox, 1}))
    assert read(token_ids, [], hiding) == ("the", 2)
    assert read(token_ids, [], TextRules(stop_strings)) == ("the fox", 2)


# -- all texts of a request ------------------------------------------------------------------------


def letters(*token_ids: int, index: int = 0, finish: SequenceFinish | None = None) -> Tokens:
    return Tokens(token_ids, index=index, finish=finish)


FOX = tuple(TOKENIZER.encode("the fox"))
STOP = TextRules((" fox",))
USAGE = Usage(1, 2, 3, 0)


def test_last_piece_has_the_finish_when_request_is_plain() -> None:
    texts = RequestTexts(TOKENIZER, SamplingParams(), [5])

    told = texts.receive(Tokens(FOX)) + texts.receive(Finish(FinishReason.LENGTH, None, USAGE))

    assert told == [
        Piece("the fox", FOX),
        Piece("", finish=SequenceFinish(0, FinishReason.LENGTH, None, 2)),
        End(FinishReason.LENGTH, USAGE),
    ]


def test_plain_request_ends_at_a_stop_string() -> None:
    texts = RequestTexts(TOKENIZER, SamplingParams(), [5], STOP)

    told = texts.receive(Tokens((*FOX, 7, 8)))

    assert told == [
        Piece(
            "the",
            FOX,
            finish=SequenceFinish(0, FinishReason.STOP, None, 2),
            stop_string=" fox",
        ),
        End(FinishReason.STOP, Usage(1, 2, 0, 0), " fox"),
    ]
    assert texts.num_output_tokens == 2


def test_request_goes_on_when_one_of_its_texts_has_ended() -> None:
    texts = RequestTexts(TOKENIZER, SamplingParams(n=2), [5], STOP)
    ended = SequenceFinish(1, FinishReason.LENGTH, None, 1)

    texts.receive(letters(*FOX, index=0))
    assert texts.receive(letters(7, index=0)) == []
    *_, end = texts.receive(letters(7, index=1, finish=ended))

    # The first is still computed: nobody told the server of its stop string.
    assert end == End(FinishReason.STOP, Usage(1, 3, 0, 0), " fox")


def test_best_text_keeps_its_score_when_stopped() -> None:
    texts = RequestTexts(TOKENIZER, SamplingParams(best_of=2), [5], STOP)
    best = SequenceFinish(0, FinishReason.LENGTH, None, 4, cumulative_logprob=-1.5)

    told = [*texts.receive(letters(*FOX, 7, 8)), *texts.receive(letters(finish=best))]

    scored = SequenceFinish(0, FinishReason.STOP, None, 2, cumulative_logprob=-1.5)
    assert told == [Piece("the", FOX), Piece("", finish=scored, stop_string=" fox")]


def test_texts_end_as_aborted_when_their_request_was() -> None:
    texts = RequestTexts(TOKENIZER, SamplingParams(n=2), [5], TextRules((" foxes",)))
    texts.receive(letters(*FOX, index=1))

    told = texts.receive(Finish(FinishReason.ABORTED, None, USAGE))

    assert told == [
        Piece("", finish=SequenceFinish(0, FinishReason.ABORTED, None, 0)),
        Piece(" fox", index=1, finish=SequenceFinish(1, FinishReason.ABORTED, None, 2)),
        End(FinishReason.ABORTED, USAGE),
    ]
