"""Expected completions of a FakeExecutor, computed without a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from executor_service.steps.sampling_params import Grammar
from executor_service.steps.sampling_params import SamplingParams as ExecutorParams
from scheduler_service.scheduler.values.beam_search import BeamSearch, Hypothesis
from scheduler_service.scheduler.values.request import sequence_seed
from scheduler_service.scheduler.values.sampling_params import BeamParams, EarlyStopping
from splitserve_client import Choices, Completion, FinishReason, Regex, SamplingParams
from tests.support.fakes.fake_chain import expected_tokens
from tests.support.fakes.fake_constraints import choose_allowed
from tests.support.fakes.fake_grammar import allowed_by
from tests.support.fakes.fake_logprobs import fake_logprob

VOCAB_SIZE = 128

# So many tokens after a prompt, by a seed.
_Say = Callable[[Sequence[int], int, int], list[int]]


def expected_completions(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    adapter: str = "",
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: Sequence[int] = (),
    num_words: int | None = None,
) -> tuple[Completion, ...]:
    """The completions of `params`, which give seed and max_tokens, in the order of their index.

    `num_words`: as of the runner.
    """
    say = partial(expected_tokens, vocab_size=vocab_size, adapter=adapter, num_words=num_words)
    if params.beam_search is not None:
        return _expected_beams(prompt, params, say, vocab_size)
    num_sequences = params.best_of or params.n or 1
    sequences = [
        _expected_sequence(prompt, params, index, say)
        if params.grammar is None
        else _expected_by_grammar(prompt, params, index, say, vocab_size, eos_token_ids)
        for index in range(num_sequences)
    ]
    if params.is_streamed:
        return tuple(sequences)
    scored = [_with_logprob(sequence) for sequence in sequences]
    scored.sort(key=lambda c: (-(c.cumulative_logprob or 0.0) / len(c.token_ids), c.index))
    return tuple(
        Completion(index, c.token_ids, (), c.reason, c.stop_token_id, c.cumulative_logprob)
        for index, c in enumerate(scored[: params.n or 1])
    )


def _expected_sequence(
    prompt: Sequence[int], params: SamplingParams, index: int, say: _Say
) -> Completion:
    assert params.max_tokens is not None
    tokens = say(prompt, params.max_tokens, _seed_of(params, index))
    for position, token_id in enumerate(tokens):
        if token_id in params.stop_token_ids:
            kept = tuple(tokens[: position + 1])
            return Completion(index, kept, (), FinishReason.STOP, token_id)
    return Completion(index, tuple(tokens), (), FinishReason.LENGTH)


def _expected_by_grammar(
    prompt: Sequence[int],
    params: SamplingParams,
    index: int,
    say: _Say,
    vocab_size: int,
    eos: Sequence[int],
) -> Completion:
    assert params.max_tokens is not None
    seed, grammar, output = _seed_of(params, index), _grammar_of(params), list[int]()
    while len(output) < params.max_tokens:
        (free,) = say([*prompt, *output], 1, seed)
        allowed = allowed_by(grammar, output, vocab_size, eos)
        assert allowed, "a grammar of the test leads nowhere"
        output.append(choose_allowed(free, ExecutorParams(), (), vocab_size, allowed))
        if output[-1] in {*eos, *params.stop_token_ids}:
            return Completion(index, tuple(output), (), FinishReason.STOP, output[-1])
    return Completion(index, tuple(output), (), FinishReason.LENGTH)


def _seed_of(params: SamplingParams, index: int) -> int:
    assert params.seed is not None
    return 0 if params.temperature == 0 else sequence_seed(params.seed, index)


def _grammar_of(params: SamplingParams) -> Grammar:
    match params.grammar:
        case Choices(texts):
            return Grammar("choices", texts)
        case Regex(text):
            return Grammar("regex", (text,))
    raise AssertionError(f"{params.grammar} is of no kind that tests of services use")


def _with_logprob(completion: Completion) -> Completion:
    logprob = sum(map(fake_logprob, completion.token_ids))
    return Completion(
        completion.index,
        completion.token_ids,
        (),
        completion.reason,
        completion.stop_token_id,
        logprob,
    )


def _expected_beams(
    prompt: Sequence[int], params: SamplingParams, say: _Say, vocab_size: int
) -> tuple[Completion, ...]:
    beams, max_tokens = params.beam_search, params.max_tokens
    assert beams is not None
    assert max_tokens is not None
    length_penalty = 1.0 if beams.length_penalty is None else beams.length_penalty
    stopping = EarlyStopping(beams.early_stopping.value if beams.early_stopping else "heuristic")
    search = BeamSearch(
        BeamParams(beams.width, length_penalty, stopping),
        n=params.n or 1,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens or 0,
        stop_token_ids=frozenset(params.stop_token_ids),
    )
    live: list[list[int]] = [[]]
    while not search.is_finished:
        candidates = [
            _candidates(say, [*prompt, *tokens], search.num_candidates, vocab_size)
            for tokens in live
        ]
        selection = search.advance(candidates)
        live = [[*live[parent], token_id] for parent, token_id in selection.beams]
    return tuple(map(_completion_of, range(params.n or 1), search.hypotheses))


def _candidates(
    say: _Say, tokens: Sequence[int], count: int, vocab_size: int
) -> list[tuple[int, float]]:
    """What a FakeRunner calls the most probable tokens after `tokens`."""
    (best,) = say(tokens, 1, 0)
    return [((best + i) % vocab_size, fake_logprob((best + i) % vocab_size)) for i in range(count)]


def _completion_of(index: int, hypothesis: Hypothesis) -> Completion:
    is_stopped = hypothesis.stop_token_id is not None
    return Completion(
        index,
        tuple(hypothesis.token_ids),
        (),
        FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        hypothesis.stop_token_id,
        float(np.float32(hypothesis.cumulative_logprob)),
        float(np.float32(hypothesis.score)),
    )
