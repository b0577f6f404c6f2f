from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_client import Detokenizer, StopStrings, Tokenizer
from tests.support.models import tiny_tokenizers

TOKENIZERS = {
    "byte_level": Tokenizer(tiny_tokenizers.byte_level(), None),
    "sentencepiece": Tokenizer(tiny_tokenizers.sentencepiece(), None),
}
TEXTS = st.text(max_size=40) | st.text(
    alphabet="the fox\n ü🦊▁你\N{REPLACEMENT CHARACTER}", max_size=40
)
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


@each_tokenizer
@settings(deadline=None)
@given(text=TEXTS)
def test_detokenizer_pieces_add_up_when_the_text_is_random(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)

    assert "".join(stream(tokenizer.detokenizer(), token_ids)) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 419), max_size=40))
def test_detokenizer_pieces_add_up_when_bytes_are_no_text(token_ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_level"]

    assert "".join(stream(tokenizer.detokenizer(), token_ids)) == tokenizer.decode(token_ids)


@each_tokenizer
@settings(deadline=None)
@given(text=TEXTS.filter(lambda text: "\N{REPLACEMENT CHARACTER}" not in text))
def test_detokenizer_gives_no_half_character_when_tokens_split_it(
    tokenizer: Tokenizer, text: str
) -> None:
    pieces = stream(tokenizer.detokenizer(), tokenizer.encode(text))

    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@each_tokenizer
@settings(deadline=None)
@given(text=TEXTS, data=st.data())
def test_detokenizer_continues_the_context_when_there_is_one(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    token_ids = tokenizer.encode(text)
    split = data.draw(st.integers(0, len(token_ids)))
    context = tokenizer.decode(token_ids[:split])
    if context.endswith("\N{REPLACEMENT CHARACTER}"):
        return

    pieces = stream(tokenizer.detokenizer(token_ids[:split]), token_ids[split:])

    assert context + "".join(pieces) == tokenizer.decode(token_ids)


def test_detokenizer_keeps_the_space_when_a_sentencepiece_output_continues_its_prompt() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]

    pieces = stream(tokenizer.detokenizer(tokenizer.encode("the")), tokenizer.encode("fox"))

    assert "".join(pieces) == " fox"


def test_detokenizer_keeps_the_space_when_a_special_token_comes_before_it() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    token_ids = [*tokenizer.encode("the"), 2, *tokenizer.encode("fox")]

    assert "".join(stream(tokenizer.detokenizer(), token_ids)) == "the fox"


def test_detokenizer_does_not_hold_back_forever_when_no_character_comes() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    (first_byte, *_) = tokenizer.encode("\N{SNOWMAN}")
    detokenizer = tokenizer.detokenizer()

    pieces = [detokenizer.push([first_byte]) for _ in range(1000)]

    assert sum(map(len, pieces)) > 900


@settings(deadline=None)
@given(pieces=st.lists(st.text(alphabet="abc", max_size=3), max_size=12), data=st.data())
def test_stop_strings_cut_as_on_the_whole_text_when_pieces_are_random(
    pieces: list[str], data: st.DataObject
) -> None:
    texts = st.text(alphabet="abc", min_size=1, max_size=3)
    stops = data.draw(st.lists(texts, max_size=3))
    filter_ = StopStrings(stops)

    shown = "".join(map(filter_.push, pieces))
    if filter_.found is None:
        shown += filter_.finish()

    whole = "".join(pieces)
    hits = [whole.find(stop) for stop in stops if stop in whole]
    # What ends first is found first; its text before it has been shown by then.
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if hits:
        assert filter_.found is not None
        assert whole.startswith(shown + filter_.found)
        assert len(shown) <= max(hits)
        assert len(shown) + len(filter_.found) <= min(ends) + 3
    else:
        assert filter_.found is None
        assert shown == whole


def test_stop_strings_hold_back_when_one_may_begin() -> None:
    stops = StopStrings(["###"])

    assert [stops.push("a#"), stops.push("#"), stops.push("b##"), stops.push("#c")] == [
        "a", "", "##b", "",
    ]  # fmt: skip
    assert stops.found == "###"


@settings(deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=3), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    num_early=st.integers(0, 12),
)
def test_stop_strings_count_from_the_first_piece_that_may_end_when_some_may_not(
    pieces: list[str], stops: list[str], num_early: int
) -> None:
    filter_ = StopStrings(stops)
    shown = "".join(
        filter_.push(piece, may_end=index >= num_early) for index, piece in enumerate(pieces)
    )
    found = filter_.found
    shown += filter_.finish()

    whole, expected = "", None
    for index, piece in enumerate(pieces):
        ends = range(len(whole) + 1, len(whole) + len(piece) + 1)
        whole += piece
        hits = [
            (end - len(stop), -len(stop), stop)
            for end in ends
            for stop in stops
            if whole[:end].endswith(stop)
        ]
        if hits and index >= num_early:
            start, _, expected = min(hits)
            whole = whole[:start]
            break
    assert (shown, found) == (whole, expected)
