"""The model of a FakeRunner as pure functions: tokens, constraints, grammars and logprobs.

A *chain* stands for all tokens up to a position, the adapter and the encoder tokens, as the keys of
a model of many layers do.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from executor_service.steps import Grammar, Int32Array, LogprobColumns, SamplingParams, StepInput

UInt64Array = npt.NDArray[np.uint64]

VOCAB_SIZE = 128
WORD = 2**64 - 1
_CHAIN = 2**62 - 1
_TOKEN_FACTOR = 0x9E3779B97F4A7C15
_POSITION_FACTOR = 0xC2B2AE3D27D4EB4F
_FACTOR = 0xD6E8FEB86659FD93
_ENCODER = 0x2545F4914F6CDD1D


def mix(chain: int, token: int, position: int) -> int:
    """The chain after `token` at `position`; 0 .. 2^62 - 1."""
    word = (chain ^ (token * _TOKEN_FACTOR + position * _POSITION_FACTOR)) & WORD
    word = (word * _FACTOR) & WORD
    return (word ^ (word >> 29)) & _CHAIN


def mix_columns(chains: UInt64Array, tokens: UInt64Array, positions: UInt64Array) -> UInt64Array:
    """`mix` of whole arrays."""
    words = chains ^ (tokens * np.uint64(_TOKEN_FACTOR) + positions * np.uint64(_POSITION_FACTOR))
    words = words * np.uint64(_FACTOR)
    return (words ^ (words >> np.uint64(29))) & np.uint64(_CHAIN)


@cache
def adapter_chain(adapter: str) -> int:
    """Chain that an adapter adds; 0 without an adapter."""
    digest = hashlib.sha256(adapter.encode()).digest()
    return int.from_bytes(digest[:8], "little") & _CHAIN if adapter else 0


def encoder_start(adapter: str) -> int:
    """The chain before the first encoder token."""
    return adapter_chain(adapter) ^ _ENCODER


def encoder_chain(encoder: Iterable[int], adapter: str) -> int:
    """Chain that the decoder reads of its encoder tokens; 0 without any."""
    tokens = list(encoder)
    chain = encoder_start(adapter)
    for position, token in enumerate(tokens):
        chain = mix(chain, token, position)
    return chain if tokens else 0


def attended(chains: Iterable[int]) -> int:
    """Result of attention over the chains of a window; depends on each of them."""
    result = 0
    for index, chain in enumerate(chains):
        result = mix(result, chain, index)
    return result


def token_of(word: int, vocab_size: int, num_words: int | None = None) -> int:
    """Token that a FakeRunner samples for a mix. `num_words`: number of distinct tokens."""
    return word % vocab_size if num_words is None else 1 + word % num_words


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    seed: int,
    vocab_size: int,
    *,
    adapter: str = "",
    encoder: Sequence[int] = (),
    window: int | None = None,
    num_words: int | None = None,
) -> list[int]:
    """The first `num_tokens` tokens a FakeRunner samples after `prompt`; `seed` 0 for greedy.

    `encoder`: encoder tokens. `window`: the runner's `sliding_window_tokens`; even one that is
    longer than the sequence gives other tokens than None. `num_words`: as of the runner.
    """
    cross = encoder_chain(encoder, adapter)
    start = adapter_chain(adapter) ^ cross
    chains: list[int] = []
    output: list[int] = []
    for token in prompt:
        chains.append(_next_chain(start, chains, token, window))
    for position in range(len(prompt), len(prompt) + num_tokens):
        read = chains[-1] if window is None else attended(chains[-window:])
        output.append(token_of(mix(read ^ cross, seed, position), vocab_size, num_words))
        chains.append(_next_chain(start, chains, output[-1], window))
    return output


def expected_reads(
    tokens: Sequence[int], *, adapter: str, encoder: Sequence[int], window: int | None
) -> list[int]:
    """Chains that each of `tokens` reads, its own included; see `expected_tokens`."""
    cross = encoder_chain(encoder, adapter)
    start = adapter_chain(adapter) ^ cross
    chains: list[int] = []
    reads: list[int] = []
    for token in tokens:
        chains.append(_next_chain(start, chains, token, window))
        read = chains[-1] if window is None else attended(chains[-window:])
        reads.append(read ^ cross)
    return reads


def _next_chain(start: int, chains: Sequence[int], token: int, window: int | None) -> int:
    """A window of one token sees nothing of the tokens before."""
    before = chains[-1] if chains and window != 1 else start
    return mix(before, token, len(chains))


def choose_allowed(
    token_id: int,
    params: SamplingParams,
    history: Sequence[int],
    vocab_size: int,
    by_grammar: Collection[int] | None = None,
) -> int:
    """`token_id`, or the next one that may follow `history`; -1 where none may.

    `by_grammar`: those that a grammar allows, None without one.
    """
    banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    if by_grammar is not None:
        banned |= set(range(vocab_size)) - set(by_grammar)
    if params.allowed_token_ids:
        banned |= set(range(vocab_size)) - set(params.allowed_token_ids)
    for *before, last in params.bad_words_token_ids:
        if list(history[max(len(history) - len(before), 0) :]) == before:
            banned.add(last)
    for offset in range(vocab_size):
        candidate = (token_id + offset) % vocab_size
        if candidate not in banned:
            return candidate
    return -1


_MODULUS = 3
_END_EVERY = 5


def is_invalid(grammar: Grammar) -> bool:
    """Whether it cannot be compiled."""
    return any(text.startswith("!") for text in grammar.texts)


def allowed_by(
    grammar: Grammar, output: Sequence[int], vocab_size: int, eos: Collection[int]
) -> frozenset[int] | None:
    """Tokens allowed after `output`; None if the grammar is invalid, or `output` breaks it."""
    if is_invalid(grammar):
        return None
    if grammar.kind == "choices":
        return _of_choices(grammar, output, eos)
    for position in range(len(output)):
        if output[position] not in _of_rule(grammar, output[:position], vocab_size, eos):
            return None
    return _of_rule(grammar, output, vocab_size, eos)


def _of_choices(
    grammar: Grammar, output: Sequence[int], eos: Collection[int]
) -> frozenset[int] | None:
    choices = [list(map(int, text.split())) for text in grammar.texts]
    kept = [choice for choice in choices if choice[: len(output)] == list(output)]
    if not kept:
        return None
    allowed = {choice[len(output)] for choice in kept if len(choice) > len(output)}
    return frozenset(allowed | (set(eos) if list(output) in kept else set()))


def _of_rule(
    grammar: Grammar, output: Sequence[int], vocab_size: int, eos: Collection[int]
) -> frozenset[int]:
    """Every third token, beginning with one that all of `output` decides; sometimes the end."""
    start = (zlib.crc32(grammar.texts[0].encode()) + sum(output)) % _MODULUS
    allowed = set(range(start, vocab_size, _MODULUS)) - set(eos)
    return frozenset(allowed | (set(eos) if sum(output) % _END_EVERY == 0 else set()))


def fake_logprob(token: int) -> float:
    """Logprob of a sampled token. Exact in float32."""
    return -(token % 8 + 1) / 16


def fake_prompt_logprob(token: int, read: int) -> float:
    """Logprob of a prompt token after one that reads `read`. Exact in float32."""
    return -((token ^ read) % 8 + 1) / 16


def sampled_scores(step: StepInput, tokens: Int32Array, vocab_size: int) -> LogprobColumns | None:
    """Scores of sampled tokens, for rows that ask."""
    scored = []
    ends = (step.num_computed_tokens + step.num_new_tokens).tolist()
    for row, token in enumerate(tokens.tolist()):
        num_top = step.sampling_params[row].num_logprobs
        if token >= 0 and num_top is not None:
            scored.append((row, ends[row], token, num_top, fake_logprob(token)))
    return _columns(scored, vocab_size)


def prompt_scores(
    step: StepInput, vocab_size: int, read: Callable[[int, int], int]
) -> LogprobColumns | None:
    """Scores of the prompt tokens after each input token, for rows that ask.

    `read`: what the token of a row, at a position, reads.
    """
    scored = []
    for row, history in enumerate(step.histories):
        num_top = step.sampling_params[row].num_prompt_logprobs
        if num_top is None or history is None:
            continue
        start = int(step.num_computed_tokens[row])
        end = min(start + int(step.num_new_tokens[row]), int(step.num_prompt_tokens[row]) - 1)
        for position in range(start, end):
            token = history[position + 1]
            logprob = fake_prompt_logprob(token, read(row, position))
            scored.append((row, position + 1, token, num_top, logprob))
    return _columns(scored, vocab_size)


def _columns(
    scored: Sequence[tuple[int, int, int, int, float]], vocab_size: int
) -> LogprobColumns | None:
    """`scored`: row, position, token, number of alternatives, and logprob of each."""
    if not scored:
        return None
    rows, positions, tokens, wanted, logprobs = zip(*scored, strict=True)
    num_top = [min(n, vocab_size) for n in wanted]
    each = zip(tokens, num_top, strict=True)
    top = [(token + i) % vocab_size for token, n in each for i in range(n)]
    return LogprobColumns(
        row_indexes=np.array(rows, np.int32),
        positions=np.array(positions, np.int32),
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        ranks=np.ones(len(scored), np.int32),
        top_offsets=np.cumsum([0, *num_top]).astype(np.int32),
        top_token_ids=np.array(top, np.int32),
        top_logprobs=np.array([fake_logprob(token) for token in top], np.float32),
    )
