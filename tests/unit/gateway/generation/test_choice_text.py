"""The text of a choice: the same however its tokens arrive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_client import Tokenizer
from splitserve_gateway.generation.choice_text import ChoiceText, StopRule, ending_token_ids
from tests.support.models import tiny_tokenizers

TOKENIZER = Tokenizer.from_files({"tokenizer.json": tiny_tokenizers.byte_level().to_str().encode()})
VOCAB_SIZE = 406


def read(token_ids: Sequence[int], cuts: Sequence[int], rule: StopRule) -> tuple[str, int]:
    """The text, and how many tokens were taken, if they arrive cut at `cuts`."""
    text = ChoiceText(TOKENIZER.detokenizer(), rule)
    shown, taken = "", 0
    places = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    for start, end in itertools.pairwise(places):
        piece, num_read = text.push(token_ids[start:end])
        shown, taken = shown + piece, taken + num_read
        if text.stop_string is not None:
            return shown, taken
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
    rule = StopRule((stop,), frozenset(), is_included, min_tokens)
    shown, taken = read(token_ids, cuts, rule)
    assert (shown, taken) == read(token_ids, range(len(token_ids)), rule)
    if min_tokens == 0 and stop in whole:
        assert shown == whole[: whole.index(stop) + len(stop) * is_included]
        assert stop in TOKENIZER.decode(token_ids[:taken])
    assert read(token_ids, cuts, StopRule((), frozenset(), False, 0)) == (whole, len(token_ids))


@pytest.mark.parametrize("is_included", [True, False])
def test_tokens_that_end_a_text_are_shown_only_when_included(is_included: bool) -> None:
    (fox,) = TOKENIZER.encode(" fox")
    rule = StopRule((), ending_token_ids([1], [fox], ignore_eos=False), is_included, 0)
    token_ids = [*TOKENIZER.encode("the"), fox]
    assert read(token_ids, [], rule) == ("the fox" if is_included else "the", 2)


def test_end_of_sequence_ends_no_text_when_it_is_ignored() -> None:
    assert ending_token_ids([1, 2], [7], ignore_eos=True) == {7}
    assert ending_token_ids([1, 2], [7], ignore_eos=False) == {1, 2, 7}
