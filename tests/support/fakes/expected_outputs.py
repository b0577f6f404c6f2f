"""Expected outputs of requests over a FakeRunner, computed without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from executor_service.steps import Grammar as ExecutorGrammar
from executor_service.steps import SamplingParams as ExecutorParams
from scheduler_service.scheduler.engine.blocks import (
    boundary_of,
    extend_chain,
    hash_encoder_blocks,
    root_hash,
)
from scheduler_service.scheduler.engine.planning import max_len_of
from scheduler_service.scheduler.values import (
    BeamParams,
    BeamSearch,
    EarlyStopping,
    FinishReason,
    Grammar,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    sequence_seed,
)
from splitserve_client import BeamSearch as ClientBeamSearch
from splitserve_client import Choices, Completion, Regex
from splitserve_client import FinishReason as ClientFinishReason
from splitserve_client import SamplingParams as ClientParams
from tests.support.fakes.fake_model import (
    VOCAB_SIZE,
    adapter_chain,
    allowed_by,
    choose_allowed,
    encoder_chain,
    encoder_start,
    expected_reads,
    expected_tokens,
    fake_logprob,
    fake_prompt_logprob,
    mix,
)


@dataclass(frozen=True, slots=True)
class Spec:
    """Request before its creation. `num_resumed`: output tokens that each sequence resumes with."""

    prompt: tuple[int, ...]
    params: SamplingParams
    scheduling: SchedulingParams = SchedulingParams()  # noqa: RUF009
    seed: int = 0
    encoder: tuple[int, ...] = ()
    num_resumed: int = 0


@dataclass(slots=True)
class ExpectedOutputs:
    """Complete outputs of a request, and why each of them ends.

    `outputs`: of the sequences of a request that is streamed, else its completions. `scores`: of
    the hypotheses of a beam search. `prompt_logprobs`: of the tokens after the first. `contents`:
    by block hash, the chains of each block that its sequences may fill for others to find.
    """

    outputs: list[list[int]] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    contents: dict[bytes, tuple[int, ...]] = field(default_factory=dict)


def create_request(spec: Spec, arrival: int, resumed: Sequence[Sequence[int]] = ()) -> Request:
    """Creates the request of `spec`. `resumed`: output tokens that its sequences resume with."""
    return Request.create(
        f"r{arrival}",
        spec.prompt,
        spec.params,
        arrival=arrival,
        seed=spec.seed,
        resume_token_ids=resumed,
        scheduling=spec.scheduling,
        encoder_token_ids=spec.encoder or None,
    )


class Oracle:
    """Computes outputs under one configuration. `num_words`: that of the FakeRunner."""

    def __init__(self, config: SchedulerConfig, num_words: int | None = None) -> None:
        self._config = config
        self._num_words = num_words

    def make_request(self, spec: Spec, arrival: int) -> tuple[Request, ExpectedOutputs]:
        """Returns a request that can run under the configuration, and its expected outputs."""
        bare = create_request(spec, arrival)
        stop_len = max_len_of(bare, self._config)
        if spec.params.max_tokens is not None:
            stop_len = min(stop_len, len(spec.prompt) + spec.params.max_tokens)
        expected = ExpectedOutputs(prompt_logprobs=self._prompt_logprobs(spec))
        if spec.scheduling.uses_prefix_cache:
            self._note_encoder(spec, bare, expected)
        if spec.params.beam is not None:
            self._search(spec, bare, stop_len, expected)
            return bare, expected
        seeds = [sequence_seed(spec.seed, i) for i in range(spec.params.num_sequences)]
        ends = [self._decode(spec, bare, seed, stop_len, expected) for seed in seeds]
        if not spec.params.is_streamed:
            scores = [sum(map(fake_logprob, tokens)) / len(tokens) for tokens, _ in ends]
            best = sorted(range(len(ends)), key=lambda index: (-scores[index], index))
            ends = [ends[index] for index in best[: spec.params.n]]
        expected.outputs = [tokens for tokens, _ in ends]
        expected.reasons = [reason for _, reason in ends]
        resumed = [tokens[: spec.num_resumed] for tokens in expected.outputs]
        return create_request(spec, arrival, resumed), expected

    def _prompt_logprobs(self, spec: Spec) -> list[float]:
        reads = expected_reads(
            spec.prompt,
            adapter=spec.scheduling.adapter,
            encoder=spec.encoder,
            window=self._config.sliding_window,
        )
        return list(map(fake_prompt_logprob, spec.prompt[1:], reads))

    def _decode(
        self, spec: Spec, request: Request, seed: int, stop_len: int, expected: ExpectedOutputs
    ) -> tuple[list[int], FinishReason]:
        stop_token_ids = self._stop_token_ids(spec)
        tokens = self._continue(spec, (), stop_len - len(spec.prompt), seed)
        reason = self._reason(spec, len(tokens))
        for index, token in enumerate(tokens):
            if token in stop_token_ids:
                tokens, reason = tokens[: index + 1], FinishReason.STOP
                break
        self._note(spec, request, tuple(tokens), expected)
        return tokens, reason

    def _search(
        self, spec: Spec, request: Request, stop_len: int, expected: ExpectedOutputs
    ) -> None:
        beam, vocab_size = spec.params.beam, self._config.vocab_size
        assert beam is not None
        search = BeamSearch(
            beam,
            n=spec.params.n,
            max_tokens=stop_len - len(spec.prompt),
            min_tokens=spec.params.min_tokens,
            stop_token_ids=self._stop_token_ids(spec),
        )
        num_candidates = min(search.num_candidates, vocab_size)
        outputs: list[tuple[int, ...]] = [()]
        while not search.is_finished:
            candidates = []
            for output in outputs:
                self._note(spec, request, output, expected)
                token = self._continue(spec, output, 1, 0)[0]
                top = [(token + i) % vocab_size for i in range(num_candidates)]
                candidates.append([(token, fake_logprob(token)) for token in top])
            selection = search.advance(candidates)
            outputs = [(*outputs[parent], token) for parent, token in selection.beams]
        expected.outputs = [list(hypothesis.token_ids) for hypothesis in search.hypotheses]
        expected.scores = [hypothesis.score for hypothesis in search.hypotheses]
        expected.reasons = [
            self._reason(spec, len(hypothesis.token_ids))
            if hypothesis.stop_token_id is None
            else FinishReason.STOP
            for hypothesis in search.hypotheses
        ]

    def _continue(
        self, spec: Spec, output: tuple[int, ...], num_tokens: int, seed: int
    ) -> list[int]:
        def free_tokens(tokens: tuple[int, ...], count: int) -> list[int]:
            return expected_tokens(
                tokens,
                count,
                seed if spec.params.temperature > 0 else 0,
                self._config.vocab_size,
                adapter=spec.scheduling.adapter,
                encoder=spec.encoder,
                window=self._config.sliding_window,
                num_words=self._num_words,
            )

        tokens = (*spec.prompt, *output)
        if not spec.params.uses_constraints and spec.params.grammar is None:
            return free_tokens(tokens, num_tokens)
        constraints, vocab_size = self._constraints(spec), self._config.vocab_size
        for _ in range(num_tokens):
            (free,) = free_tokens(tokens, 1)
            allowed = self._by_grammar(spec, tokens[len(spec.prompt) :])
            token = choose_allowed(free, constraints, tokens, vocab_size, allowed)
            tokens = (*tokens, token)
            if token in self._stop_token_ids(spec):
                break
        return list(tokens[len(spec.prompt) + len(output) :])

    def _by_grammar(self, spec: Spec, output: Sequence[int]) -> frozenset[int] | None:
        grammar = spec.params.grammar
        if grammar is None:
            return None
        allowed = allowed_by(
            ExecutorGrammar(grammar.kind, grammar.texts),
            output,
            self._config.vocab_size,
            self._config.eos_token_ids,
        )
        assert allowed is not None
        return allowed

    def _constraints(self, spec: Spec) -> ExecutorParams:
        stop_token_ids = self._stop_token_ids(spec)
        return ExecutorParams(
            logit_bias=spec.params.logit_bias,
            allowed_token_ids=tuple(spec.params.allowed_token_ids),
            bad_words_token_ids=tuple(
                tokens
                for tokens in spec.params.bad_words_token_ids
                if len(tokens) > 1 or tokens[0] not in stop_token_ids
            ),
        )

    def _stop_token_ids(self, spec: Spec) -> frozenset[int]:
        eos = frozenset() if spec.params.ignore_eos else self._config.eos_token_ids
        return spec.params.stop_token_ids | eos

    def _reason(self, spec: Spec, num_output_tokens: int) -> FinishReason:
        most = spec.params.max_tokens
        is_length = most is not None and num_output_tokens >= most
        return FinishReason.LENGTH if is_length else FinishReason.MODEL_LENGTH

    def _note_encoder(self, spec: Spec, request: Request, expected: ExpectedOutputs) -> None:
        """Notes the contents of the blocks of the encoder's input."""
        block_size, chains = self._config.block_size, list[int]()
        chain = encoder_start(spec.scheduling.adapter)
        for position, token in enumerate(spec.encoder):
            chain = mix(chain, token, position)
            chains.append(chain)
        for index, block_hash in enumerate(hash_encoder_blocks(self._config, request)):
            content = tuple(chains[index * block_size : (index + 1) * block_size])
            expected.contents[block_hash] = content

    def _note(
        self, spec: Spec, request: Request, output: tuple[int, ...], expected: ExpectedOutputs
    ) -> None:
        """Notes the contents of the blocks of a sequence that are published for other requests."""
        if not spec.scheduling.uses_prefix_cache:
            return
        block_size, tokens = self._config.block_size, (*spec.prompt, *output)
        num_blocks = len(tokens) // block_size
        hashes = [root_hash(self._config, request)]
        boundary = boundary_of(self._config, request)
        extend_chain(hashes, np.array(tokens, np.int32), num_blocks, block_size, boundary)
        adapter = spec.scheduling.adapter
        start = chain = adapter_chain(adapter) ^ encoder_chain(spec.encoder, adapter)
        chains = []
        for position, token in enumerate(tokens):
            chain = mix(start if self._config.sliding_window == 1 else chain, token, position)
            chains.append(chain)
        for index in range(num_blocks):
            content = tuple(chains[index * block_size : (index + 1) * block_size])
            expected.contents[hashes[index + 1]] = content


# -- completions of services -----------------------------------------------------------------------


def expected_completions(
    prompt: Sequence[int],
    params: ClientParams,
    *,
    adapter: str = "",
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: Sequence[int] = (),
    num_words: int | None = None,
) -> tuple[Completion, ...]:
    """Returns the completions that a client of FakeExecutors gets, in the order of their index.

    `params` have a seed, unless they search, and max_tokens. `num_words`: that of the FakeRunner.
    """
    assert params.max_tokens is not None
    assert params.seed is not None or params.beam_search is not None
    spec = Spec(
        tuple(prompt),
        SamplingParams(
            temperature=0.0 if params.temperature == 0 else 1.0,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens or 0,
            stop_token_ids=frozenset(params.stop_token_ids),
            n=params.n or 1,
            best_of=params.best_of,
            beam=None if params.beam_search is None else _beam_params(params.beam_search),
            ignore_eos=bool(params.ignore_eos),
            grammar=_grammar_of(params),
        ),
        SchedulingParams(adapter=adapter, uses_prefix_cache=False),
        seed=params.seed or 0,
    )
    num_rows, max_len = spec.params.num_sequences, len(prompt) + params.max_tokens
    config = SchedulerConfig(
        block_size=max_len,
        num_device_blocks=2 * num_rows,
        max_num_seqs=num_rows,
        max_num_batched_tokens=max_len,
        max_model_len=max_len,
        max_num_waiting=1,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(eos_token_ids),
    )
    _, expected = Oracle(config, num_words).make_request(spec, 1)
    return tuple(_completion(spec.params, expected, index) for index in range(spec.params.n))


def _completion(params: SamplingParams, expected: ExpectedOutputs, index: int) -> Completion:
    tokens, reason = expected.outputs[index], expected.reasons[index]
    is_ranked = not params.is_streamed
    return Completion(
        index,
        tuple(tokens),
        (),
        ClientFinishReason[reason.name],
        tokens[-1] if reason is FinishReason.STOP else None,
        sum(map(fake_logprob, tokens)) if is_ranked else None,
        float(np.float32(expected.scores[index])) if params.beam is not None else None,
    )


def _beam_params(beams: ClientBeamSearch) -> BeamParams:
    length_penalty = 1.0 if beams.length_penalty is None else beams.length_penalty
    stopping = EarlyStopping(beams.early_stopping.value if beams.early_stopping else "heuristic")
    return BeamParams(beams.width, length_penalty, stopping)


def _grammar_of(params: ClientParams) -> Grammar | None:
    match params.grammar:
        case None:
            return None
        case Choices(texts):
            return Grammar("choices", texts)
        case Regex(text):
            return Grammar("regex", (text,))
    raise AssertionError(f"{params.grammar} is of no kind that tests of services use")
