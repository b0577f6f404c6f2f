"""Texts sampled without a model: any allowed token is as likely, until a text is long enough."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from executor_service.grammars import CompiledGrammars, Vocabulary, read_token_bytes
from executor_service.steps import Grammar, TokenMasks
from splitserve_grammars import trial_command
from tests.support.models.tiny_tokenizers import byte_level

PROMPT = (5, 6, 7)
EOS = 1
# What ends a JSON value, in this order.
_CLOSERS = ('"', "}", "]")
_LONG = 40
_TOO_LONG = 400


@dataclass(frozen=True, slots=True)
class Texts:
    """A tokenizer and grammars for it. `token_bytes`: of the model, some more than it has."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    token_bytes: Sequence[bytes]

    @property
    def size(self) -> int:
        """Vocabulary size of the model."""
        return len(self.token_bytes)

    def grammars(self, max_wait_s: float = 60.0) -> CompiledGrammars:
        """Compiled grammars with a compiler; the caller closes them."""
        return CompiledGrammars(self.vocabulary, max_wait_s=max_wait_s)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes with the tokenizer, without the end-of-sequence token."""
        text: str = self.tokenizer.decode(
            [t for t in tokens if t != EOS], skip_special_tokens=False
        )
        return text

    def ids(self, text: str) -> list[int]:
        """The tokens of `text`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def texts_of(
    tokenizer: Tokenizer, eos_token_ids: Sequence[int] = (EOS,), num_padding: int = 7
) -> Texts:
    """Returns the texts of a tokenizer."""
    size = tokenizer.get_vocab_size() + num_padding
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(tokenizer.to_str())
        vocabulary = Vocabulary.read(path, size, eos_token_ids)
        return Texts(tokenizer, vocabulary, read_token_bytes(path, size))


@cache
def byte_level_texts() -> Texts:
    """Returns the texts of the byte-level tokenizer."""
    return texts_of(byte_level())


def allowed_tokens(masks: TokenMasks, row: int, size: int) -> list[int]:
    """Tokens that `masks` allow a row."""
    [line] = np.flatnonzero(masks.rows == row)
    bits = np.unpackbits(masks.words[line].view(np.uint8), bitorder="little")[:size]
    return np.flatnonzero(bits).tolist()


@dataclass(slots=True)
class Sampled:
    """Result of one grammar. `text`: None if it did not end. `error`: if it was refused."""

    grammar: Grammar
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    error: str = ""

    @property
    def is_live(self) -> bool:
        """Whether there is more to come."""
        return not self.error and self.text is None and len(self.tokens) < _TOO_LONG


def sample_texts(texts: Texts, grammars: Sequence[Grammar], seed: int = 0) -> list[Sampled]:
    """One text for each grammar; all are rows of the same steps."""
    generator = random.Random(seed)
    followed = texts.grammars()
    sampled = [Sampled(grammar) for grammar in grammars]
    histories = [list(PROMPT) for _ in grammars]
    for row_id, (grammar, history) in enumerate(zip(grammars, histories, strict=True)):
        followed.add(row_id, grammar, history, len(PROMPT))
    live = list(range(len(grammars)))
    try:
        while live:
            rows = np.arange(len(live))
            masks = followed.of_step(rows, np.array(live, np.int32)).masks(rows)
            for row, error in masks.invalid.items():
                sampled[live[row]].error = error
            for row in masks.rows.tolist():
                one = sampled[live[row]]
                token = _choose(texts, allowed_tokens(masks, row, texts.size), one, generator)
                histories[live[row]].append(token)
                one.tokens.append(token)
                if token == EOS:
                    one.text = texts.decode(one.tokens)
            live = [row for row in live if sampled[row].is_live]
        followed.remove(np.arange(len(grammars), dtype=np.int32))
    finally:
        followed.close()
    return sampled


def _choose(texts: Texts, allowed: list[int], one: Sampled, generator: random.Random) -> int:
    if len(one.tokens) > _LONG and generator.random() < 0.9:
        if EOS in allowed:
            return EOS
        for closer in _CLOSERS:
            if (token := texts.ids(closer)[0]) in allowed:
                return token
    return generator.choice(allowed)


def json_schema(schema: object) -> Grammar:
    """A schema, as a grammar."""
    return Grammar("json_schema", (json.dumps(schema),))


def failing_first(folder: Path, num_failures: int) -> Sequence[str]:
    """A command that ends by itself the first times, before it reads anything."""
    count = str(folder / "count")
    code = (
        "import os, sys\n"
        f"open({count!r}, 'a').write('x')\n"
        f"if os.path.getsize({count!r}) <= {num_failures}: sys.exit(1)\n"
        f"os.execv({sys.executable!r}, {trial_command()!r})\n"
    )
    return [sys.executable, "-c", code]
