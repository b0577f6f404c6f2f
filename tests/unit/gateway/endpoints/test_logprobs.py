"""Logprobs as JSON."""

from __future__ import annotations

import math

import pytest

from splitserve_client import Tokenizer, TokenLogprob, TopLogprob
from splitserve_gateway.endpoints import (
    CompletionLogprobs,
    TokenNames,
    chat_logprobs,
    finite,
    joined,
    prompt_logprobs,
)
from tests.support.models import tiny_tokenizers

TOKENIZER = Tokenizer.from_files({"tokenizer.json": tiny_tokenizers.byte_level().to_str().encode()})
NAMES = TokenNames(TOKENIZER)
FOX_BYTES = [*TOKENIZER.encode("🐉")]


def score(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, 1, tuple(TopLogprob(*each) for each in top))


@pytest.mark.parametrize("value", [-math.inf, -1e30, math.nan])
def test_logprob_is_a_number_in_json_whatever_it_was(value: float) -> None:
    assert finite(value) == -9999.0


def test_offsets_are_right_when_characters_have_several_tokens() -> None:
    assert len(FOX_BYTES) > 1
    token_ids = [*TOKENIZER.encode("the"), *FOX_BYTES, *TOKENIZER.encode(" dog")]
    logprobs = CompletionLogprobs(NAMES, TOKENIZER.detokenizer())
    pieces = [logprobs.shape([score(token_id, -1.0)]) for token_id in token_ids]
    shape = joined(pieces)
    text = TOKENIZER.decode(token_ids)
    assert shape["text_offset"][0] == 0
    assert set(shape["text_offset"][1:-1]) == {len("the")}
    assert shape["text_offset"][-1] == text.index(" dog")


def test_the_more_probable_counts_when_two_tokens_have_one_text() -> None:
    first, second = [token_id for token_id in range(406) if NAMES.name(token_id) == "\ufffd"][:2]
    logprobs = CompletionLogprobs(NAMES, TOKENIZER.detokenizer())
    shape = logprobs.shape([score(first, -3.0, (second, -1.0), (first, -3.0))])
    assert shape["top_logprobs"] == [{"\ufffd": -1.0}]


def test_bytes_of_tokens_add_up_to_the_character() -> None:
    shapes = chat_logprobs([score(token_id, -1.0) for token_id in FOX_BYTES], NAMES)
    found = [byte for shape in shapes for byte in shape["bytes"]]  # type: ignore[attr-defined]
    assert bytes(found).decode() == "🐉"


def test_prompt_logprobs_have_the_token_itself_and_the_best() -> None:
    scores = [TokenLogprob(7, -4.0, 9, (TopLogprob(8, -0.5), TopLogprob(9, -1.0)))]
    first, second = prompt_logprobs(scores, NAMES)
    assert first is None
    assert isinstance(second, dict)
    assert {name: entry["rank"] for name, entry in second.items()} == {"7": 9, "8": 1, "9": 2}
