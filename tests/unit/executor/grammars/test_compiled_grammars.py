"""Masks, beside what can be told without a parser: which tokens continue one of some texts."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from executor_service.grammars import CompiledGrammars, GrammarCompiler
from executor_service.steps import Grammar, TokenMasks
from splitserve_grammars import PARSER_LIMITS, GrammarTrialResult, GrammarTrials
from tests.support.grammars.sampled_texts import (
    EOS,
    PROMPT,
    Texts,
    allowed_tokens,
    byte_level_texts,
    json_schema,
    sample_texts,
    texts_of,
)
from tests.support.models.tiny_tokenizers import byte_level, sentencepiece

CHOICES = ("the", "the quick", "then", "Straße", "🦊", "🦊🦊", "quick the")


class HeldTrial(GrammarTrials):
    """Waits until the test lets it."""

    gate = threading.Event()

    def ask(self, kind: str, texts: Sequence[str], max_cpu_s: float) -> GrammarTrialResult:
        self.gate.wait()
        return GrammarTrialResult()


@pytest.fixture
def grammars() -> Iterator[CompiledGrammars]:
    followed = byte_level_texts().grammars()
    yield followed
    followed.close()


@contextmanager
def held_grammars(max_wait_s: float) -> Iterator[CompiledGrammars]:
    """Grammars that compile nothing before the gate of HeldTrial is open."""
    HeldTrial.gate.clear()
    vocabulary = byte_level_texts().vocabulary
    followed = CompiledGrammars(vocabulary, GrammarCompiler(vocabulary, HeldTrial), max_wait_s)
    try:
        yield followed
    finally:
        HeldTrial.gate.set()
        followed.close()


def settled(followed: CompiledGrammars, row_ids: Sequence[int], num_others: int = 0) -> TokenMasks:
    """When none of the rows is pending any more."""
    while (masks := masks_of(followed, row_ids, num_others)).pending:
        pass
    return masks


def masks_of(followed: CompiledGrammars, row_ids: Sequence[int], num_others: int = 0) -> TokenMasks:
    """As in a step whose first `num_others` rows have no grammar."""
    rows = np.arange(num_others, num_others + len(row_ids))
    step = followed.of_step(rows, np.array(row_ids, np.int32))
    return step.masks(np.arange(num_others + len(row_ids)))


def allowed_after(
    texts: Texts, followed: CompiledGrammars, grammar: Grammar, output: list[int]
) -> set[int]:
    """What follows `output` in a row that came with it."""
    followed.add(0, grammar, [*PROMPT, *output], len(PROMPT))
    masks = masks_of(followed, [0])
    assert not masks.invalid
    return set(allowed_tokens(masks, 0, texts.size))


def continuing(texts: Texts, choices: Sequence[str], output: bytes, eos: set[int]) -> set[int]:
    """By the texts alone."""
    tokens = {
        token
        for token, text in enumerate(texts.token_bytes)
        if text and any(choice.encode().startswith(output + text) for choice in choices)
    }
    return tokens | (eos if output.decode(errors="replace") in choices else set())


@pytest.mark.parametrize(
    ("texts", "eos"),
    [
        (byte_level_texts(), {EOS}),
        (texts_of(sentencepiece(), (2,)), {2}),
        (texts_of(byte_level(), (1, 0, 400)), {0, 1, 400}),
    ],
    ids=["bytes", "sentencepiece", "many_ends"],
)
def test_tokens_are_those_that_continue_a_choice(texts: Texts, eos: set[int]) -> None:
    grammar = Grammar("choices", CHOICES)
    followed = texts.grammars()
    try:
        seen: set[bytes] = set()
        waiting: list[list[int]] = [[]]
        while waiting:
            output = waiting.pop()
            text = b"".join(texts.token_bytes[token] for token in output)
            allowed = allowed_after(texts, followed, grammar, output)
            assert allowed == continuing(texts, CHOICES, text, eos), text
            if text not in seen:
                seen.add(text)
                waiting += [[*output, token] for token in allowed - eos]
        assert {choice.encode() for choice in CHOICES} <= seen
        assert len(seen) > 20
    finally:
        followed.close()


def test_end_alone_is_allowed_when_the_sequence_has_ended(grammars: CompiledGrammars) -> None:
    texts = byte_level_texts()
    ids = texts.ids("the")
    for output in ([*ids, EOS], [*ids, EOS, EOS]):
        assert allowed_after(texts, grammars, Grammar("regex", ("the",)), output) == {EOS}


def test_masks_are_the_same_when_rebuilt_from_any_prefix(
    grammars: CompiledGrammars,
) -> None:
    texts = byte_level_texts()
    schema = json_schema(
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}}
    )
    [one] = sample_texts(texts, [schema], seed=3)
    assert one.text is not None
    history = list(PROMPT)
    grammars.add(1, schema, history, len(PROMPT))
    for length in range(len(one.tokens) + 1):
        followed = masks_of(grammars, [1])
        grammars.add(2, schema, [*PROMPT, *one.tokens[:length]], len(PROMPT))
        rebuilt = masks_of(grammars, [2])
        assert (followed.words == rebuilt.words).all()
        if length < len(one.tokens):
            history.append(one.tokens[length])


def test_rows_do_not_touch_each_other_when_they_share_a_grammar(grammars: CompiledGrammars) -> None:
    texts = byte_level_texts()
    histories = [[*PROMPT, *texts.ids(text)] for text in ("", "a", "b", "ab")]
    for row_id, history in enumerate(histories):
        grammars.add(row_id, Grammar("regex", ("a?b?c",)), history, len(PROMPT))
    masks = settled(grammars, range(4), num_others=2)
    expected = ["abc", "bc", "c", "c"]
    for row, letters in zip(masks.rows.tolist(), expected, strict=True):
        assert allowed_tokens(masks, row, texts.size) == sorted(texts.ids(c)[0] for c in letters)
    assert masks.rows.tolist() == [2, 3, 4, 5]


def test_row_fails_alone_when_its_tokens_do_not_follow(grammars: CompiledGrammars) -> None:
    texts = byte_level_texts()
    special_and_padding = (0, texts.size - 1)
    grammar = Grammar("regex", ("(?s).*",))
    grammars.add(0, grammar, list(PROMPT), len(PROMPT))
    for row_id, token in enumerate(special_and_padding, start=1):
        grammars.add(row_id, grammar, [*PROMPT, token], len(PROMPT))
    grammars.add(3, Grammar("regex", ("a+",)), [*PROMPT, *texts.ids("aab")], len(PROMPT))
    masks = settled(grammars, range(4))
    assert masks.rows.tolist() == [0]
    assert sorted(masks.invalid) == [1, 2, 3]
    assert masks.invalid[3] == "token 6 of the sequence does not match the grammar"


def test_special_tokens_are_not_allowed_when_a_grammar_allows_anything(
    grammars: CompiledGrammars,
) -> None:
    texts = byte_level_texts()
    for grammar in (Grammar("regex", ("(?s).*",)), Grammar("lark", ("start: <[*]>",))):
        allowed = allowed_after(texts, grammars, grammar, [])
        has_text = {t for t in range(texts.size) if texts.vocabulary.has_text[t]}
        ends = {EOS} if grammar.kind == "regex" else set()
        assert allowed <= has_text | ends
        assert ends <= allowed


def test_end_is_not_allowed_before_the_text_is_complete(
    grammars: CompiledGrammars,
) -> None:
    texts = byte_level_texts()
    grammar = Grammar("lark", ('start: x "b"\nx[stop=""]: /a*/\n',))
    assert EOS not in allowed_after(texts, grammars, grammar, texts.ids("a"))


@pytest.mark.parametrize(
    ("grammar", "text", "error"),
    [
        (json_schema({"$ref": "#"}), "", "no text matches it"),
        (
            Grammar("lark", ('start: "aab" x\nx: x',)),
            "aab",
            "no token of the model can continue the text",
        ),
    ],
)
def test_row_is_invalid_when_nothing_continues_its_text(
    grammar: Grammar, text: str, error: str, grammars: CompiledGrammars
) -> None:
    grammars.add(0, grammar, [*PROMPT, *byte_level_texts().ids(text)], len(PROMPT))
    assert settled(grammars, [0]).invalid == {0: error}


def test_row_is_pending_alone_when_its_grammar_is_not_compiled() -> None:
    with held_grammars(0.001) as held:
        for row_id in (3, 4):
            held.add(row_id, Grammar("regex", ("a" * row_id,)), list(PROMPT), len(PROMPT))
        masks = masks_of(held, [3, 4], num_others=1)
        assert (masks.rows.tolist(), list(masks.pending), masks.invalid) == ([], [1, 2], {})
        HeldTrial.gate.set()
        assert settled(held, [3, 4], num_others=1).rows.tolist() == [1, 2]


def test_step_does_not_wait_when_none_of_its_rows_samples() -> None:
    with held_grammars(1e9) as held:
        held.add(0, Grammar("regex", ("a",)), list(PROMPT), len(PROMPT))
        step = held.of_step(np.array([0]), np.array([0], np.int32))
        masks = step.masks(np.array([], np.int64))
        assert (len(masks.rows), list(masks.pending), masks.invalid) == (0, [], {})


def test_step_waits_when_it_has_nothing_else_to_sample() -> None:
    with held_grammars(60.0) as held:
        held.add(0, Grammar("regex", ("a",)), list(PROMPT), len(PROMPT))
        opening = threading.Timer(0.0, HeldTrial.gate.set)
        opening.start()
        assert masks_of(held, [0]).rows.tolist() == [0]
        opening.join()


def test_row_is_pending_when_it_came_with_many_tokens(
    grammars: CompiledGrammars,
) -> None:
    texts = byte_level_texts()
    output = texts.ids("x") * 1000
    grammars.add(0, Grammar("regex", ("x*",)), [*PROMPT, *output], len(PROMPT))
    grammars.add(1, Grammar("regex", ("a",)), list(PROMPT), len(PROMPT))
    num_pending = 0
    while masks_of(grammars, [0, 1], num_others=1).pending:
        num_pending += 1
    assert num_pending >= 3
    grammars.add(0, Grammar("regex", ("x*",)), [*PROMPT, *output], len(PROMPT))
    assert settled(grammars, [0]).rows.tolist() == [0]


def test_rows_are_forgotten_when_they_are_removed(grammars: CompiledGrammars) -> None:
    grammars.add(0, Grammar("regex", ("a",)), list(PROMPT), len(PROMPT))
    grammars.remove(np.array([0, 7], np.int32))
    with pytest.raises(KeyError):
        masks_of(grammars, [0])


def test_rows_keep_their_grammars_when_a_step_is_run_in_parts(grammars: CompiledGrammars) -> None:
    texts = byte_level_texts()
    for row_id, letter in enumerate("abc"):
        grammars.add(row_id, Grammar("regex", (letter,)), list(PROMPT), len(PROMPT))
    step = grammars.of_step(np.array([1, 3, 4]), np.arange(3, dtype=np.int32))
    settled(grammars, range(3))
    part = step.take(np.array([0, 3, 4]))
    masks = part.masks(np.array([0, 2]))
    assert masks.rows.tolist() == [1]
    assert allowed_tokens(masks, 1, texts.size) == texts.ids("c")


def test_row_fails_alone_when_its_mask_takes_too_much(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = json_schema({"type": "object"})
    grammars.add(0, schema, list(PROMPT), len(PROMPT))
    settled(grammars, [0])
    monkeypatch.setitem(PARSER_LIMITS, "step_max_items", 1)
    grammars.add(1, json_schema({"type": "array"}), list(PROMPT), len(PROMPT))
    masks = settled(grammars, [0, 1])
    assert "too many ways" in masks.invalid[1]
    assert masks.rows.tolist() == [0]


@pytest.mark.cases(10)
@pytest.mark.parametrize(
    ("text", "is_complete"),
    [
        ('{"a":1}', True),
        ('{ "a" : 1 }', True),
        ('{\n  "a": 1\n}', True),
        ('{\n\t"a":\n\t\t1\n}', True),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
        (" {}", False),
        ("{} ", False),
    ],
)
@pytest.mark.parametrize(
    "schema", [{"type": "object"}, True, {"$ref": "#/$defs/a", "$defs": {"a": {}}}]
)
def test_json_white_space_is_a_space_or_an_indented_line(
    text: str, is_complete: bool, schema: object, grammars: CompiledGrammars
) -> None:
    texts = byte_level_texts()
    output = [texts.token_bytes.index(bytes([byte])) for byte in text.encode()]
    grammars.add(0, json_schema(schema), [*PROMPT, *output], len(PROMPT))
    masks = settled(grammars, [0])
    assert (not masks.invalid and EOS in allowed_tokens(masks, 0, texts.size)) == is_complete


# Each text of 12 letters is another state of its lexer.
MANY_STATES = Grammar("regex", ("(a|b)*a(a|b){40}c",))


def sampled(
    grammars: CompiledGrammars, row_id: int, num_tokens: int, seed: int, lost: list[int]
) -> str:
    """The error of a row that samples so many tokens. `lost`: gets the lengths at which it was."""
    texts = byte_level_texts()
    letters = [texts.ids("a")[0], texts.ids("b")[0]]
    generator = random.Random(seed)
    history = list(PROMPT)
    grammars.add(row_id, MANY_STATES, history, len(PROMPT))
    for _ in range(num_tokens):
        masks = settled(grammars, [row_id])
        if masks.lost:
            lost.append(len(history))
            grammars.add(row_id, MANY_STATES, history, len(PROMPT))
            masks = settled(grammars, [row_id])
        if masks.invalid:
            return masks.invalid[row_id]
        assert set(letters) <= set(allowed_tokens(masks, 0, texts.size))
        history.append(generator.choice(letters))
    return ""


def test_rows_go_on_when_others_have_filled_the_lexer(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 400)
    lost: list[int] = []
    assert [sampled(grammars, seed, 60, seed, lost) for seed in range(8)] == [""] * 8
    assert lost


def test_row_is_invalid_when_an_empty_lexer_does_not_help(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 20)
    error = "its terminals have too many states or expressions"
    assert sampled(grammars, 0, 60, 0, []) == error
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 10_000)
    assert sampled(grammars, 1, 60, 0, []) == ""
