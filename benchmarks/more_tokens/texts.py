"""Texts that a model is to say by heart: edited code, summaries that quote, and what never repeats.

Each place of a text has a token of its own, so that the model may know what follows by the last
token alone. What repeats itself is therefore only what an output takes over from its prompt: the
repetitions within a text, which speculation would find as well, are left out.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Those before are for the beginning and the end of texts, and for bytes.
FIRST_TOKEN_ID = 300
SOURCE = Path(__file__).parents[2] / "scheduler_service" / "scheduler" / "engine" / "engine.py"
_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")
_NAME = re.compile(r"[A-Za-z_]\w{3,}")
# Of all names that occur several times, so many are given others.
_RENAMED_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what the model says after it."""

    prompt: list[int]
    output: list[int]

    @property
    def taken_over_ratio(self) -> float:
        """Which part of the output is in the prompt."""
        known = set(self.prompt)
        return sum(token in known for token in self.output) / len(self.output)


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts that are asked for, `num_at_once` of them at a time."""

    name: str
    texts: list[Text]
    num_at_once: int = 1

    @property
    def num_tokens(self) -> int:
        """That are generated."""
        return sum(len(text.output) for text in self.texts)


class _Tokens:
    """Token ids that nobody has used."""

    def __init__(self) -> None:
        self._ids: Iterator[int] = itertools.count(FIRST_TOKEN_ID)

    def take(self, num_tokens: int) -> list[int]:
        return list(itertools.islice(self._ids, num_tokens))


def make_workloads(num_texts: int, num_tokens: int, seed: int = 0) -> list[Workload]:
    """The same ones for the same arguments. `num_tokens`: of each output."""
    tokens, rng = _Tokens(), random.Random(seed)
    return [
        Workload("random", [_random(tokens, num_tokens) for _ in range(num_texts)]),
        Workload("editing", [_editing(tokens, rng, num_tokens) for _ in range(num_texts)]),
        Workload("quoting", [_quoting(tokens, rng, num_tokens) for _ in range(num_texts)]),
        Workload("random, 8 at once", [_random(tokens, num_tokens // 2) for _ in range(8)], 8),
    ]


def next_tokens(workloads: list[Workload]) -> dict[int, int]:
    """What follows each token that is the last of a prompt or in an output.

    Raises ValueError if one token is followed by two.
    """
    following: dict[int, int] = {}
    for text in itertools.chain.from_iterable(workload.texts for workload in workloads):
        for token, following_token in itertools.pairwise([text.prompt[-1], *text.output]):
            if following.setdefault(token, following_token) != following_token:
                raise ValueError(f"token {token} is followed by two others")
    return following


def _random(tokens: _Tokens, num_tokens: int) -> Text:
    """Nothing occurs twice."""
    return Text(tokens.take(128), tokens.take(num_tokens))


def _editing(tokens: _Tokens, rng: random.Random, num_tokens: int) -> Text:
    """The prompt has a piece of source code, the output has it again, with other names in it.

    Which names, and where they stand, is that of a file of ours.
    """
    words = _TOKEN.findall(SOURCE.read_text(encoding="utf-8"))
    start = rng.randrange(len(words) - num_tokens)
    words = words[start : start + num_tokens]
    counts = Counter(word for word in words if _NAME.fullmatch(word))
    several = sorted(name for name, count in counts.items() if count > 1)
    renamed = set(rng.sample(several, math.ceil(_RENAMED_RATIO * len(several))))
    before, begin = tokens.take(num_tokens), tokens.take(1)
    after = [
        tokens.take(1)[0] if word in renamed else token
        for word, token in zip(words, before, strict=True)
    ]
    return Text(before + begin, after)


def _quoting(tokens: _Tokens, rng: random.Random, num_tokens: int) -> Text:
    """The output has sentences of its own, and in between sentences of the prompt."""
    sentences = [tokens.take(rng.randrange(12, 40)) for _ in range(16)]
    begin, output = tokens.take(1), list[int]()
    quoted = rng.sample(sentences, len(sentences))
    while len(output) < num_tokens:
        output += tokens.take(rng.randrange(6, 20))
        output += quoted.pop() if quoted else []
    return Text([*itertools.chain.from_iterable(sentences), *begin], output[:num_tokens])
