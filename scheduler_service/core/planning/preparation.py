"""Prepares a waiting request for an engine: what depends on that engine's configuration."""

from __future__ import annotations

from scheduler_service.core.beam_search import BeamSearch
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.params_sets import ParamsSet
from scheduler_service.core.planning.arrival_checks import max_len_of
from scheduler_service.core.request import Request, Sequence


def prepare_request(request: Request, config: SchedulerConfig) -> None:
    """Sets where the sequences of `request` end, its parameters as executors get them, its search.

    Mutates `request`, which no engine has. Preparing it again for another engine is allowed.
    """
    sequence = request.sequence
    request.stop_token_ids = request.params.stop_tokens(config.eos_token_ids)
    request.stop_len = max_len_of(request, config)
    if request.params.max_tokens is not None:
        by_length = sequence.num_prompt_tokens + request.params.max_tokens
        request.stop_len = min(by_length, request.stop_len)
    if request.params.beam is not None:
        _prepare_search(request, config.vocab_size)
    told = request.stop_token_ids if config.most_tokens > 1 else frozenset[int]()
    request.params_set = ParamsSet(request.row_params, told)
    request.prepared_for = config


def _prepare_search(request: Request, vocab_size: int) -> None:
    """Gives a request its beam search, which goes on if it was begun on another executor.

    Where sequences end at another length than there, it begins again from the prompt.
    """
    beam, sequence = request.params.beam, request.sequence
    assert beam is not None
    max_tokens = request.stop_len - sequence.num_prompt_tokens
    if request.search is not None and request.search.max_tokens == max_tokens:
        return
    request.search = search = BeamSearch(
        beam,
        n=request.params.n,
        max_tokens=max_tokens,
        min_tokens=request.params.min_tokens,
        stop_token_ids=request.stop_token_ids,
    )
    request.num_candidates = min(search.num_candidates, vocab_size)
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    request.sequences = [Sequence(request, 0, prompt, sequence.num_prompt_tokens, sequence.seed)]
