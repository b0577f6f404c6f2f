"""Streamed text equals what `tokenizers` decodes, for all kinds of tokenizers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve_client import Detokenizer, Tokenizer
from tests.support.models import tiny_tokenizers

pytestmark = pytest.mark.cases(12)

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "75"))
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = st.text(max_size=40) | st.text(alphabet="the fox\n ü🦊▁你" + REPLACEMENT, max_size=40)
MAIN_KINDS = ["byte_level", "sentencepiece", "gemma"]


@cache
def library_tokenizer(kind: str) -> tokenizers.Tokenizer:
    return tiny_tokenizers.with_added(tiny_tokenizers.KINDS[kind]())


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(library_tokenizer(kind))


@cache
def odd_token_ids(kind: str) -> list[int]:
    """Those that may surprise: added tokens, single bytes, spaces, ids that are no tokens."""
    tokenizer = library_tokenizer(kind)
    size = tokenizer.get_vocab_size()
    added = list(tokenizer.get_added_tokens_decoder())
    texts = {token_id: tokenizer.id_to_token(token_id) for token_id in range(size)}
    byte_tokens = [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0x80, 0x83, 0x98, 0xE2, 0xF0)]
    odd = [i for i, text in texts.items() if text in byte_tokens or text == "▁" * len(text or "")]
    characters = [i for i, text in texts.items() if text and len(text) == 1 and ord(text) > 160]
    return [*added, *odd, *odd, *characters[:40], size, size + 7, 2**31 - 1]


def token_ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    anything = st.integers(0, library_tokenizer(kind).get_vocab_size() - 1)
    odd = st.sampled_from(odd_token_ids(kind))
    texts = TEXTS.map(lambda text: list(library_tokenizer(kind).encode(text).ids))
    parts = st.lists(st.lists(anything, max_size=3) | st.lists(odd, max_size=6) | texts, max_size=5)
    return parts.map(lambda parts: [token_id for part in parts for token_id in part])


def stream(detokenizer: Detokenizer, token_ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Pushes `token_ids` in groups of these sizes, over and over."""
    pieces, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(token_ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, detokenizer.finish()]


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
@pytest.mark.parametrize("skips", [True, False])
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(data=st.data())
def test_pieces_add_up_when_tokens_are_random(kind: str, skips: bool, data: st.DataObject) -> None:
    token_ids = data.draw(token_ids_of(kind))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    detokenizer = make_tokenizer(kind).detokenizer(skip_special_tokens=skips)

    text = "".join(stream(detokenizer, token_ids, sizes))

    assert text == library_tokenizer(kind).decode(token_ids, skip_special_tokens=skips)


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(data=st.data())
def test_pieces_go_on_after_a_context(kind: str, data: st.DataObject) -> None:
    context_ids, token_ids = data.draw(token_ids_of(kind)), data.draw(token_ids_of(kind))
    skips = data.draw(st.booleans())
    library = library_tokenizer(kind)
    context = library.decode(context_ids, skip_special_tokens=skips)
    whole = library.decode(context_ids + token_ids, skip_special_tokens=skips)
    # Where what comes changes what was there, no text could go on.
    if not whole.startswith(context) or context.endswith(REPLACEMENT):
        return

    detokenizer = make_tokenizer(kind).detokenizer(context_ids, skip_special_tokens=skips)

    # A fork knows nothing of what is pushed into the one it comes from, nor that of what it gets.
    for own in (detokenizer.fork(), detokenizer.fork().fork(), detokenizer):
        assert context + "".join(stream(own, token_ids, [1, 2])) == whole


@pytest.mark.parametrize("kind", MAIN_KINDS)
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(text=TEXTS.filter(lambda text: REPLACEMENT not in text), context=TEXTS)
def test_no_half_character_is_given_when_tokens_split_it(
    kind: str, text: str, context: str
) -> None:
    tokenizer = make_tokenizer(kind)
    detokenizer = tokenizer.detokenizer(tokenizer.encode(context))

    pieces = stream(detokenizer, tokenizer.encode(text), [1])

    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", MAIN_KINDS)
def test_a_character_is_completed_when_the_context_ends_within_it(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    token_ids = tokenizer.encode("the \N{SNOWMAN}", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer(token_ids[:-1])

    assert "".join(stream(detokenizer, token_ids[-1:], [1])) == "\N{SNOWMAN}"
    assert tokenizer.detokenizer(token_ids[:-1]).finish() == ""


@pytest.mark.parametrize("kind", MAIN_KINDS)
def test_text_comes_with_its_token_when_nothing_can_change_it(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    detokenizer = tokenizer.detokenizer()
    token_ids = tokenizer.encode("the fox the fox")

    pieces = [detokenizer.push([token_id]) for token_id in token_ids]

    assert "".join(pieces).strip() == "the fox the fox"
    assert detokenizer.finish() == ""


def test_replacements_come_at_once_when_bytes_are_broken() -> None:
    library = library_tokenizer("sentencepiece")
    detokenizer = make_tokenizer("sentencepiece").detokenizer()
    tokens = [f"<0x{byte:02X}>" for byte in "\N{SNOWMAN}".encode()]
    snowman = [int(library.token_to_id(token) or 0) for token in tokens]

    pieces = [detokenizer.push([token_id]) for token_id in [*snowman, snowman[1], snowman[0]]]

    assert pieces == ["", "", "", REPLACEMENT * 4, REPLACEMENT]


def test_replacements_come_at_once_when_no_character_comes_of_bytes() -> None:
    tokenizer = make_tokenizer("byte_level")
    (first_byte, *_) = tokenizer.encode("\N{SNOWMAN}")
    detokenizer = tokenizer.detokenizer()

    pieces = [detokenizer.push([first_byte]) for _ in range(100)]

    assert pieces == ["", *[REPLACEMENT] * 99]


def test_short_byte_sequences_are_decoded_as_by_the_library() -> None:
    library = library_tokenizer("byte_level")
    tokenizer = make_tokenizer("byte_level")
    ids_of_bytes = [library.encode(chr(byte)).ids[-1] for byte in range(128)]
    firsts = (0xC0, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF)
    alphabet = {tokenizer.token_bytes(token_id): token_id for token_id in range(2, 258)}
    others = [alphabet[bytes((byte,))] for byte in (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF)]
    leads = [alphabet[bytes((byte,))] for byte in firsts]
    assert len(ids_of_bytes) == 128
    for first in leads:
        for second in (*others, *leads[:3], ids_of_bytes[65]):
            for third in (*others, leads[1], ids_of_bytes[66]):
                for last in (others[0], ids_of_bytes[67]):
                    token_ids = [first, second, third, last]
                    pieces = stream(tokenizer.detokenizer(), token_ids, [1])
                    assert "".join(pieces) == library.decode(token_ids)
