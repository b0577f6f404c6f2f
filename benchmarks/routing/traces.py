"""Two loads in which prompts share prefixes, made of random numbers with a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.routing.virtual_fleet import Turn
from scheduler_service.scheduler.values import Int32Array
from tests.support.core.virtual_fleet import SAMPLED

_VOCAB = 2**20
_THINK_S = 4.0
_Rng = np.random.Generator


class _Conversation:
    """Comes back with its history, after a while; at the end another one begins."""

    def __init__(self, rng: _Rng, system: Int32Array, think_s: float) -> None:
        self._rng = rng
        self._system = system
        self._think_s = think_s
        self._num_turns_left = 0
        self._history = system

    def turn(self, at_us: int) -> Turn:
        if self._num_turns_left == 0:
            self._num_turns_left, self._history = int(self._rng.integers(2, 12)), self._system
        self._num_turns_left -= 1
        prompt = np.concatenate([self._history, _text(self._rng, int(self._rng.integers(20, 400)))])
        num_output = int(self._rng.integers(20, 300))
        self._history = np.concatenate([prompt, np.full(num_output, SAMPLED, np.int32)])
        return Turn(at_us, prompt, num_output, self._follow)

    def _follow(self, now_us: int) -> Turn:
        return self.turn(now_us + int(self._rng.exponential(self._think_s) * 1e6))


def multi_turn_chat(num_conversations: int, seed: int = 0) -> Iterator[Turn]:
    """So many people at once, each of whom reads, thinks (4 s on average) and writes again.

    All have one system prompt of 200 tokens; of a conversation 2 to 11 turns follow each other.
    """
    rng = np.random.default_rng(seed)
    system = _text(rng, 200)
    for _ in range(num_conversations):
        own = np.random.default_rng(rng.integers(2**32))
        conversation = _Conversation(own, system, _THINK_S)
        yield conversation.turn(int(rng.uniform(0, _THINK_S * 1e6)))


def shared_system_prompts(per_s: float, until_us: int, seed: int = 0) -> Iterator[Turn]:
    """Requests at random times that begin with one of 32 system prompts, some of them much more.

    A system prompt has 1000 to 4000 tokens; the first is asked for twice as often as the second
    (Zipf). What follows has 20 to 300 tokens.
    """
    rng = np.random.default_rng(seed)
    prompts = [_text(rng, int(rng.integers(1000, 4000))) for _ in range(32)]
    shares = 1 / np.arange(1, len(prompts) + 1)
    shares /= shares.sum()
    at_us = 0.0
    while (at_us := at_us + rng.exponential(1e6 / per_s)) < until_us:
        system = prompts[rng.choice(len(prompts), p=shares)]
        prompt = np.concatenate([system, _text(rng, int(rng.integers(20, 300)))])
        yield Turn(int(at_us), prompt, int(rng.integers(20, 200)))


def _text(rng: _Rng, num_tokens: int) -> Int32Array:
    return rng.integers(10, _VOCAB, num_tokens).astype(np.int32)
