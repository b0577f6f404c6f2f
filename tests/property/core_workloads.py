"""Random configurations and requests for the core, small enough that everything gets scarce."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from scheduler_service.scheduler.queue import QUEUE_POLICIES
from scheduler_service.scheduler.values import (
    BatchPolicyName,
    BeamParams,
    EarlyStopping,
    Feature,
    Grammar,
    PreemptionMode,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    Speculation,
)
from tests.support.fakes.expected_outputs import Spec

VOCAB_SIZE = 50
MAX_MODEL_LEN = 60
EOS = 0
_MAX_STEM = 24
# Prompts begin with one of these, so that they share prefixes.
_STEMS = [Random(stem).choices(range(1, VOCAB_SIZE), k=_MAX_STEM) for stem in range(3)]
_FEATURES = frozenset(Feature) - {Feature.ADAPTERS, Feature.CROSS_ATTENTION}

_PREEMPTION_MODES = [*PreemptionMode, PreemptionMode.SWAP]

_PLAIN = SamplingParams()
_RULE = Grammar("json_schema", ("a rule",))
_CHOICES = Grammar("choices", ("5 9 12 13 14 5 5 5 5 5 5 5", "5 9", "30"))
_KINDS = [
    _PLAIN,
    SamplingParams(temperature=0.0),
    _PLAIN,
    SamplingParams(num_logprobs=2),
    SamplingParams(num_prompt_logprobs=1),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(
        allowed_token_ids=frozenset(range(0, VOCAB_SIZE, 9)),
        bad_words_token_ids=((9,), *((t, u) for t in (0, 18, 27) for u in (0, 18))),
    ),
    SamplingParams(grammar=_RULE),
    SamplingParams(grammar=_CHOICES, num_prompt_logprobs=1),
    SamplingParams(grammar=_RULE, n=3, num_logprobs=1),
    SamplingParams(grammar=_CHOICES, n=1, best_of=2),
    SamplingParams(n=2),
    SamplingParams(n=3, num_logprobs=0),
    SamplingParams(n=4),
    SamplingParams(n=2, num_prompt_logprobs=0),
    SamplingParams(n=1, best_of=3),
    SamplingParams(n=2, best_of=4, num_logprobs=1),
    SamplingParams(beam=BeamParams(2)),
    SamplingParams(n=2, beam=BeamParams(3, 0.0, EarlyStopping.NEVER)),
    SamplingParams(n=4, beam=BeamParams(4, 2.0, EarlyStopping.ALWAYS), min_tokens=3),
]


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """A configuration whose pool holds one sequence of the longest, or a few."""
    block_size = draw(st.sampled_from([4, 1, 2, 3, 16]))
    num_tokens = draw(st.sampled_from([64, 36, 48, 64, 120]))
    num_blocks = -(-num_tokens // block_size)
    max_adapters = draw(st.sampled_from([0, 0, 1, 2]))
    features = set(_FEATURES)
    if max_adapters:
        features.add(Feature.ADAPTERS)
    if draw(st.sampled_from([False, False, True])):
        features.add(Feature.CROSS_ATTENTION)
    config = SchedulerConfig(
        block_size=block_size,
        num_device_blocks=num_blocks,
        max_num_seqs=draw(st.sampled_from([6, 1, 3, 4, 8, 8])),
        max_num_batched_tokens=draw(st.sampled_from([64, 64, 16, 16, 8, 3, 1])),
        max_model_len=MAX_MODEL_LEN,
        max_num_waiting=16,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        features=frozenset(features),
        num_host_blocks=num_blocks * draw(st.sampled_from([0, 1, 2, 4, 8])) // 4,
        block_bytes=draw(st.sampled_from([0, 4096])),
        sliding_window=draw(st.sampled_from([None, None, None, 1, 3, 8, 20])),
        max_adapters=max_adapters,
        max_params_bytes=draw(st.sampled_from([None, None, 250])),
        prefix_caching=draw(st.sampled_from([True, True, True, False])),
        host_prefix_cache=draw(st.booleans()),
        separates_tenants=draw(st.booleans()),
        num_lookahead_slots=draw(st.sampled_from([0, 0, 3])),
        max_run_ahead=draw(st.sampled_from([1, 2, 5, 40])),
        max_run_ahead_ms=draw(st.sampled_from([0, 1, 1000])),
        speculation=draw(st.sampled_from(Speculation)),
        max_draft_tokens=draw(st.sampled_from([8, 1, 3, 30])),
        preemption_mode=draw(st.sampled_from(_PREEMPTION_MODES)),
        batch_policy=draw(st.sampled_from(BatchPolicyName)),
        delay_factor=draw(st.sampled_from([0.0, 0.0, 1.5])),
        queue_policy=draw(st.sampled_from(list(QUEUE_POLICIES))),
        tenant_weights={"heavy": 2.0},
    )
    if draw(st.booleans()):
        return replace(config, features=config.features - {Feature.PARTIAL_RESULTS})
    return config


def random_spec(rng: Random) -> Spec:
    """A request that uses every feature; see `fit`. Its deadline counts from its arrival."""
    kind = rng.choice(_KINDS)
    max_tokens = rng.choice([1, 5, 20, 30, 40, None])
    if kind.beam is not None:
        max_tokens = min(max_tokens or 14, 14)
    params = replace(
        kind,
        max_tokens=max_tokens,
        min_tokens=min(kind.min_tokens, max_tokens or kind.min_tokens),
        stop_token_ids=frozenset(rng.choice([(), (), (7, 9)])),
        ignore_eos=rng.random() < 0.7 and kind.grammar is None,
    )
    scheduling = SchedulingParams(
        priority=rng.choice([0, 0, -1, 1]),
        tenant=rng.choice(["", "heavy", "light"]),
        deadline_ns=rng.choice([None, None, 10_000_000, 500_000]),
        adapter=rng.choice(["", "a", "b", "c"]),
        cache_salt=rng.choice(["", "", "", "salt"]),
        uses_prefix_cache=rng.random() < 0.85,
        num_public_prefix_tokens=rng.choice([0, 0, 5, 12, 100]),
    )
    encoder = _random_prompt(rng) if rng.random() < 0.6 else ()
    num_resumed = rng.choice([0, 0, 0, 1, 6]) if params.is_streamed else 0
    prompt, seed = _random_prompt(rng), rng.randint(0, 3)
    return Spec(prompt, params, scheduling, seed, encoder, num_resumed)


def kin_of(spec: Spec, other: Spec) -> Spec:
    """`other`, with a prompt and all else that lets it share the blocks of `spec`."""
    scheduling = replace(
        other.scheduling,
        adapter=spec.scheduling.adapter,
        cache_salt=spec.scheduling.cache_salt,
        uses_prefix_cache=True,
        num_public_prefix_tokens=spec.scheduling.num_public_prefix_tokens,
    )
    prompt = (*spec.prompt, *other.prompt[-1:])
    return replace(other, prompt=prompt, scheduling=scheduling, encoder=spec.encoder)


def _random_prompt(rng: Random) -> tuple[int, ...]:
    """The beginning of a stem, and perhaps something of its own."""
    stem = rng.choice(_STEMS)[: rng.choice([1, 5, 8, 12, _MAX_STEM, rng.randint(1, _MAX_STEM)])]
    num_own = rng.choice([0, 0, 0, 1, 5, 15])
    return tuple(stem + rng.choices(range(1, VOCAB_SIZE), k=num_own))


def fit(spec: Spec, config: SchedulerConfig, now_ns: int) -> Spec:
    """The request without what an executor of `config` cannot do, arriving now."""
    scheduling = spec.scheduling
    if scheduling.deadline_ns is not None:
        scheduling = replace(scheduling, deadline_ns=now_ns + scheduling.deadline_ns)
    if Feature.ADAPTERS not in config.features:
        scheduling = replace(scheduling, adapter="")
    encoder = spec.encoder if Feature.CROSS_ATTENTION in config.features else ()
    return replace(spec, scheduling=scheduling, encoder=encoder)
