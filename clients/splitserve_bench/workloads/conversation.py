"""Workloads: conversations and turns, distributions, limits, prompt tokens, synthetic loads."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Part of a prompt, identified by `key`.

    Equal keys give equal tokens; a shorter piece is a prefix of a longer one.
    """

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Request of a conversation: pieces that extend the prompt, and the wanted output length.

    `think_s`: time between the previous answer and this turn; unused in the first turn.
    """

    pieces: tuple[PromptPiece, ...]
    num_output_tokens: int
    think_s: float = 0.0

    @property
    def num_new_tokens(self) -> int:
        """Number of prompt tokens that this turn adds."""
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Consecutive turns. `arrival_s`: time of the first turn since the beginning of the load."""

    arrival_s: float
    turns: tuple[Turn, ...]


# -- Distributions, parsed from flags --------------------------------------------------------------
# Examples: `512`, `uniform:64:1024`, `lognormal:512:1`.

Rng = np.random.Generator

FORMS = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or exponential:MEAN"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of random numbers; `text` is its form as a flag."""

    text: str
    draw: Callable[[Rng], float]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Parses a flag. Raises ValueError, whose message gives the allowed forms."""
        name, *rest = text.split(":")
        try:
            numbers = [float(number) for number in (rest or [name])]
        except ValueError:
            numbers = [math.nan]
        kind = "constant" if not rest else name
        num_wanted = _NUM_NUMBERS.get(kind)
        if len(numbers) != num_wanted or not all(0 <= number < math.inf for number in numbers):
            raise ValueError(f"{text!r} is not a distribution of numbers from 0; allowed: {FORMS}")
        if kind == "uniform" and numbers[0] > numbers[1]:
            raise ValueError(f"{text!r} has LOW above HIGH; allowed: LOW <= HIGH")
        if kind == "lognormal" and numbers[0] == 0:
            raise ValueError(f"{text!r} has the median 0; allowed: above 0")
        return cls(text, _DRAWS[kind](*numbers))

    def draw_count(self, rng: Rng, smallest: int = 1, largest: int | None = None) -> int:
        """Draws a whole number, clamped to `smallest` and `largest`."""
        number = round(min(self.draw(rng), 2.0**53))
        return max(number if largest is None else min(number, largest), smallest)


def _constant(value: float) -> Callable[[Rng], float]:
    return lambda _rng: value


def _uniform(low: float, high: float) -> Callable[[Rng], float]:
    return lambda rng: float(rng.uniform(low, high))


def _lognormal(median: float, sigma: float) -> Callable[[Rng], float]:
    return lambda rng: float(rng.lognormal(math.log(median), sigma))


def _exponential(mean: float) -> Callable[[Rng], float]:
    return lambda rng: float(rng.exponential(mean))


_DRAWS: Mapping[str, Callable[..., Callable[[Rng], float]]] = MappingProxyType(
    {
        "constant": _constant,
        "uniform": _uniform,
        "lognormal": _lognormal,
        "exponential": _exponential,
    }
)
_NUM_NUMBERS = MappingProxyType({"constant": 1, "uniform": 2, "lognormal": 2, "exponential": 1})


# -- Limits on a workload --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a workload; None for no limit.

    `speed`: 2 plays the workload twice as fast. `duration_s`: bound on arrival times after `speed`.
    """

    num_conversations: int | None = None
    duration_s: float | None = None
    speed: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def apply(self, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
        """Yields the conversations within the limits; stops at the first one beyond."""
        if self.num_conversations == 0:
            return
        for number, conversation in enumerate(conversations, start=1):
            arrival_s = conversation.arrival_s / self.speed
            if self.duration_s is not None and arrival_s > self.duration_s:
                return
            yield replace(
                conversation, arrival_s=arrival_s, turns=tuple(map(self._cut, conversation.turns))
            )
            if number == self.num_conversations:
                return

    def _cut(self, turn: Turn) -> Turn:
        num_output_tokens = min(turn.num_output_tokens, self.max_output_tokens or 2**63)
        return Turn(self._cut_prompt(turn.pieces), num_output_tokens, turn.think_s)

    def _cut_prompt(self, pieces: tuple[PromptPiece, ...]) -> tuple[PromptPiece, ...]:
        """Cuts a prompt to `max_prompt_tokens`. Keeps the beginning, which prompts may share."""
        left = self.max_prompt_tokens
        if left is None:
            return pieces
        cut = []
        for piece in pieces:
            cut.append(replace(piece, num_tokens=min(piece.num_tokens, left)))
            left -= cut[-1].num_tokens
            if left == 0:
                break
        return tuple(cut)


# -- Tokens of prompts -----------------------------------------------------------------------------

_NUM_KEPT = 1024
_KEY_BITS = 64


class PromptTokens:
    """Makes token ids for pieces, from `low` up to below `high`.

    A different `salt` gives new tokens. So no prompt is in the prefix cache from an earlier run,
    while prompts of one run share the prefixes of their pieces. Caches the tokens of the latest
    1024 pieces.
    """

    def __init__(self, salt: int, low: int, high: int) -> None:
        self._salt = salt % 2**_KEY_BITS
        self._low = low
        self._high = high
        self._kept: OrderedDict[int, list[int]] = OrderedDict()

    def of(self, pieces: Iterable[PromptPiece]) -> list[int]:
        """Returns the token ids of all pieces, concatenated."""
        return [token_id for piece in pieces for token_id in self._tokens(piece)]

    def _tokens(self, piece: PromptPiece) -> list[int]:
        known = self._kept.pop(piece.key, [])
        if len(known) < piece.num_tokens:
            known = self._draw(piece)
        self._kept[piece.key] = known
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return known if len(known) == piece.num_tokens else known[: piece.num_tokens]

    def _draw(self, piece: PromptPiece) -> list[int]:
        key = self._salt << _KEY_BITS | piece.key % 2**_KEY_BITS
        # Each token uses its own raw word, so a shorter piece is a prefix of a longer one.
        words = np.random.Philox(key=key).random_raw(piece.num_tokens)
        ids: list[int] = (self._low + words % np.uint64(self._high - self._low)).tolist()
        return ids


# -- Synthetic workloads: independent requests, conversations, shared prefixes ---------------------


def _constantly(text: str) -> Distribution:
    return Distribution.parse(text)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Shared beginning of prompts: one of `num_groups` texts of `num_tokens`, equally likely."""

    num_tokens: int = 0
    num_groups: int = 1

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """Parses `TOKENS` or `TOKENS:GROUPS`. Raises ValueError."""
        tokens, _, groups = text.partition(":")
        if not tokens.isdecimal() or not (groups or "1").isdecimal() or groups == "0":
            raise ValueError(f"{text!r} is not a shared prefix; allowed: TOKENS or TOKENS:GROUPS")
        return cls(int(tokens), int(groups or "1"))


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Workload drawn from a seed. `prompt_tokens`: tokens that each turn adds to the shared prefix.

    `burstiness`: coefficient of variation of the times between arrivals (gamma distribution): 0 is
    regular, 1 a Poisson process, and above 1 arrivals come in bursts.
    """

    prompt_tokens: Distribution = field(default_factory=lambda: _constantly("512"))
    output_tokens: Distribution = field(default_factory=lambda: _constantly("128"))
    shared_prefix: SharedPrefix = field(default_factory=SharedPrefix)
    turns: Distribution = field(default_factory=lambda: _constantly("1"))
    think_s: Distribution = field(default_factory=lambda: _constantly("0"))
    conversations_per_s: float | None = None
    burstiness: float = 1.0

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Yields conversations without end. Prompts depend on the seed only, not on the rate."""
        arriving, asking = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        arrival_s, next_key = 0.0, 0
        while True:
            arrival_s += self._gap_s(arriving)
            turns = tuple(self._turns(asking, next_key))
            next_key += len(turns)
            yield Conversation(arrival_s, turns)

    def _gap_s(self, rng: Rng) -> float:
        if self.conversations_per_s is None:
            return 0.0
        if self.burstiness == 0:
            return 1 / self.conversations_per_s
        variance = self.burstiness**2
        return float(rng.gamma(1 / variance, variance / self.conversations_per_s))

    def _turns(self, rng: Rng, first_key: int) -> Iterator[Turn]:
        group = int(rng.integers(self.shared_prefix.num_groups))
        shared = PromptPiece(-1 - group, self.shared_prefix.num_tokens)
        for number in range(self.turns.draw_count(rng)):
            own = PromptPiece(first_key + number, self.prompt_tokens.draw_count(rng))
            pieces = (shared, own) if number == 0 and shared.num_tokens else (own,)
            think_s = self.think_s.draw(rng) if number else 0.0
            yield Turn(pieces, self.output_tokens.draw_count(rng), think_s)
