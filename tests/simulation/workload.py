"""Random requests of every kind, as clients of the library ask for them, and what they must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from scheduler_service.scheduler.values import sequence_seed
from splitserve_client import BeamSearch, Choices, Completion, SamplingParams, SchedulingParams
from tests.support.fakes.expected_outputs import expected_completions
from tests.support.fakes.fake_model import VOCAB_SIZE, expected_reads, fake_prompt_logprob

EOS = (0,)
_MAX_STEM = 24
_MAX_OWN = 12
MAX_TOKENS = 16
# Of a request with one sequence that a burst does not have.
_MANY_TOKENS = 64
# The most tokens of all sequences of a request together.
MOST_TOKENS = 4 * (_MAX_STEM + _MAX_OWN + MAX_TOKENS)
# The most sequences of a request with long answers, and the most tokens of all of them together.
_MOST_LONG_SEQUENCES = 3
MOST_LONG_TOKENS = _MOST_LONG_SEQUENCES * (_MAX_STEM + _MAX_OWN + _MANY_TOKENS)
# Prompts begin with one of these, so that they share prefixes.
_STEMS = [Random(stem).choices(range(1, VOCAB_SIZE), k=_MAX_STEM) for stem in range(3)]
# How many words a model knows; None for all tokens. One that knows few repeats itself, so that what
# it says next can be guessed.
NUM_WORDS = (None, None, None, 1, 2, 2, 4)
_CHOICES = Choices(("5 9 12 13 14 5 5 5 5 5 5 5", "5 9", "30 31 32 33"))
_PLAIN = SamplingParams(ignore_eos=True)
_KINDS = (
    _PLAIN,
    _PLAIN,
    replace(_PLAIN, temperature=0.0),
    replace(_PLAIN, temperature=0.0),
    replace(_PLAIN, num_logprobs=2),
    replace(_PLAIN, num_prompt_logprobs=1),
    replace(_PLAIN, frequency_penalty=0.5, repetition_penalty=1.2),
    replace(_PLAIN, stop_token_ids=(7, 9, 60, 61, 62)),
    replace(_PLAIN, n=2),
    replace(_PLAIN, n=3, num_logprobs=0),
    replace(_PLAIN, n=4, stop_token_ids=(7, 9, 60, 61)),
    replace(_PLAIN, n=1, best_of=3),
    replace(_PLAIN, n=2, best_of=4),
    replace(_PLAIN, beam_search=BeamSearch(2)),
    replace(_PLAIN, n=2, beam_search=BeamSearch(3, 0.0)),
    SamplingParams(grammar=_CHOICES),
    replace(_PLAIN, temperature=0.0),
    _PLAIN,
)

_LONG_KINDS = (
    _PLAIN,
    replace(_PLAIN, temperature=0.0),
    replace(_PLAIN, num_logprobs=2),
    replace(_PLAIN, n=2),
    replace(_PLAIN, n=2, num_logprobs=0),
    replace(_PLAIN, n=_MOST_LONG_SEQUENCES),
)


@dataclass(frozen=True)
class Wanted:
    """A request, and how its client behaves.

    `at_s`: when it comes. `abort_after`: events after which the client ends it. `read_pause_s`:
    how long it takes over each event. `num_words`: of the model.
    """

    number: int
    at_s: float
    prompt: tuple[int, ...]
    params: SamplingParams
    scheduling: SchedulingParams
    in_session: bool
    abort_after: int | None = None
    read_pause_s: float = 0.0
    num_words: int | None = None

    @property
    def request_id(self) -> str:
        """Its name at the scheduler."""
        return f"r{self.number}"

    @cached_property
    def seeds(self) -> frozenset[int]:
        """Those of its sequences."""
        assert self.params.seed is not None
        return frozenset(sequence_seed(self.params.seed, index) for index in range(4))

    @cached_property
    def completions(self) -> tuple[Completion, ...]:
        """What it must get."""
        return expected_completions(
            self.prompt, self.params, eos_token_ids=EOS, num_words=self.num_words
        )

    @cached_property
    def prompt_logprobs(self) -> list[float]:
        """Of all prompt tokens but the first; empty if it does not ask."""
        if self.params.num_prompt_logprobs is None:
            return []
        reads = expected_reads(self.prompt[:-1], adapter="", encoder=(), window=None)
        return list(map(fake_prompt_logprob, self.prompt[1:], reads))


def random_requests(
    random: Random, count: int, within_s: float, num_words: int | None
) -> list[Wanted]:
    """Requests that come within so many seconds."""
    return [_random_request(random, number, within_s, num_words) for number in range(count)]


def _random_request(random: Random, number: int, within_s: float, num_words: int | None) -> Wanted:
    params = random.choice(_KINDS)
    if num_words is not None and params.stop_token_ids:
        params = replace(params, stop_token_ids=(num_words, 60))
    # Long enough that something can happen to it.
    max_tokens = random.choice([1, 8, MAX_TOKENS, MAX_TOKENS])
    if params.beam_search is not None:
        max_tokens = min(max_tokens, 10)
    params = replace(params, max_tokens=max_tokens, seed=1_000 * (number + 1))
    scheduling = SchedulingParams(
        priority=random.choice([0, 0, -1, 1]),
        tenant=random.choice(["", "heavy", "light"]),
        deadline_s=random.choice([None] * 6 + [0.5, 30.0]),
        cache_salt=random.choice(["", "", "", "salt"]),
        bypass_prefix_cache=random.random() < 0.1,
        num_public_prefix_tokens=random.choice([0, 0, 8, 100]),
    )
    return Wanted(
        number,
        random.random() * within_s if random.random() < 0.7 else 0.5,
        _random_prompt(random, num_words),
        params,
        scheduling,
        in_session=random.random() < 0.6,
        abort_after=random.choice([None] * 8 + [0, 1, 5]),
        read_pause_s=random.choice([0.0] * 8 + [0.01, 0.3]),
        num_words=num_words,
    )


def random_burst(random: Random, count: int, num_words: int | None) -> list[Wanted]:
    """Requests that come at one moment, but for a few; many of them with grammars of their own."""
    requests = random_requests(random, count, 0.2, num_words)
    return [
        replace(
            request,
            at_s=0.5 if random.random() < 0.8 else request.at_s,
            params=_with_grammar(request, random) if random.random() < 0.3 else request.params,
        )
        for request in requests
    ]


def equal_requests(
    random: Random, count: int, within_s: float, num_words: int | None
) -> list[Wanted]:
    """Requests that cost the same and share nothing, of classes and tenants of all kinds.

    Those of a tenant come one after the other.
    """
    params = replace(_PLAIN, max_tokens=4)
    tenants = sorted(random.choices(["heavy", "heavy", "light", "other"], k=count))
    if random.random() < 0.5:
        tenants.reverse()
    times_s = sorted(random.random() * within_s for _ in range(count))
    return [
        Wanted(
            number,
            at_s,
            tuple(random.choices(range(1, VOCAB_SIZE), k=6)),
            replace(params, seed=1_000 * (number + 1)),
            SchedulingParams(
                priority=random.choice([0, 0, -1, 1]),
                tenant=tenant,
                deadline_s=random.uniform(100.0, 200.0),
            ),
            in_session=True,
            num_words=num_words,
        )
        for number, (at_s, tenant) in enumerate(zip(times_s, tenants, strict=True))
    ]


def growing_requests(
    random: Random, count: int, within_s: float, num_words: int | None
) -> list[Wanted]:
    """Requests that begin small and go on for long, so that all run side by side at first."""
    return [
        replace(
            request,
            prompt=request.prompt[-random.choice([1, 4, 8]) :],
            params=replace(request.params, max_tokens=random.choice([32, _MANY_TOKENS])),
            abort_after=random.choice([None] * 8 + [5, 20]),
        )
        for request in random_requests(random, count, within_s, num_words)
        if not request.params.has_several_sequences
    ]


def long_requests(
    random: Random, count: int, within_s: float, num_words: int | None
) -> list[Wanted]:
    """Requests of one or several sequences, with answers long enough to be disturbed often."""
    return [
        replace(
            request,
            params=replace(
                random.choice(_LONG_KINDS),
                max_tokens=random.choice([32, _MANY_TOKENS]),
                seed=request.params.seed,
            ),
            abort_after=None,
        )
        for request in random_requests(random, count, within_s, num_words)
    ]


def _with_grammar(request: Wanted, random: Random) -> SamplingParams:
    """Choices among which one is this request's own, or those of another request, too."""
    own = 1 + random.choice([request.number, request.number // 3])
    grammar = Choices((*_CHOICES.texts, f"40 {own} 41 42 43 44 45 46"))
    params = request.params
    return SamplingParams(max_tokens=params.max_tokens, seed=params.seed, grammar=grammar)


def _random_prompt(random: Random, num_words: int | None) -> tuple[int, ...]:
    stem: Sequence[int] = random.choice(_STEMS)[: random.choice([1, 8, 12, _MAX_STEM, _MAX_STEM])]
    num_own = random.choice([0, 0, 1, 5, _MAX_OWN])
    # Its end is as the model speaks, so that there is something to guess from the first token on.
    own = range(1, VOCAB_SIZE) if num_words is None else range(1, 1 + num_words)
    return (*stem, *random.choices(own, k=num_own))
