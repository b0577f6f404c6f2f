"""Tests the codec of journals: what is written comes back, and no field is forgotten."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest

from scheduler_service.journal import (
    decode_config,
    decode_event,
    decode_fleet_config,
    decode_request,
    decode_sampling_params,
    decode_scheduling_params,
    encode_effect,
    encode_event,
    encode_fields,
    encode_request,
)
from scheduler_service.scheduler import LossCause, effects, events
from scheduler_service.scheduler.values import (
    Assignment,
    BatchPolicyName,
    BeamParams,
    BeamSearch,
    EarlyStopping,
    Feature,
    FinishReason,
    FleetConfig,
    Grammar,
    PoolingParams,
    PoolingTask,
    PreemptionMode,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    ScoredToken,
    Sequence,
    SequenceStatus,
    Speculation,
    StepOutcome,
    StepStatus,
    VectorSizes,
)
from scheduler_service.step_codec import ReceivedResult, decode_part, decode_result
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as journal
from tests.support.core.driver import make_config

CONFIG = make_config(
    features=frozenset({Feature.ADAPTERS, Feature.LOGPROBS}),
    num_host_blocks=3,
    block_bytes=2**40,
    sliding_window=7,
    max_encoder_tokens=5,
    vectors=VectorSizes(6, 2, is_uncached=True),
    max_adapters=2,
    model_digest="abc",
    max_params_bytes=2**40,
    prefix_caching=False,
    host_prefix_cache=False,
    separates_tenants=False,
    num_lookahead_slots=4,
    max_run_ahead=9,
    max_run_ahead_ms=17,
    speculation=Speculation.PROMPT_LOOKUP,
    max_draft_tokens=3,
    max_num_encoder_tokens=11,
    preemption_mode=PreemptionMode.SWAP,
    batch_policy=BatchPolicyName.PREFILL_FIRST,
    delay_factor=0.1,
    queue_policy="fair",
    tenant_weights={"a": 0.3},
)
PARAMS = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias={3: -1.7},
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=frozenset({4, 5}),
    ignore_eos=True,
    num_logprobs=0,
    num_prompt_logprobs=1,
    n=2,
    best_of=3,
    beam=BeamParams(4, 0.6, EarlyStopping.NEVER),
    allowed_token_ids=frozenset({9, 7}),
    bad_words_token_ids=((5,), (7, 6, 7)),
    grammar=Grammar("choices", ("a",)),
    pooling=PoolingParams(PoolingTask.SCORES, 3, raw=True, second_text_start=2),
)
SCHEDULING = SchedulingParams(
    -3,
    "tenant",
    2**60,
    "adapter",
    "salt",
    uses_prefix_cache=False,
    num_public_prefix_tokens=7,
    target_itl_ms=40,
)

# Of a request that no core has, these have their first value, or are set by `readmit`.
SET_BY_READMIT = {
    "params_set",
    "stop_len",
    "stop_token_ids",
    "prepared_for",
    "rank",
    "step_class",
    "queued_at_ns",
    "num_queued_tokens",
}
OF_A_CORE = {
    "cross_blocks",
    "host_cross_blocks",
    "is_encoded",
    "encoded_in_step",
    "encoder_hashes",
    "status",
}
OF_AN_END = {"finish_reason", "error", "completions", "vector"}
OF_A_ROW = {"request", "row_id", "num_promised", "num_computed", "host_table", "candidates"}
DERIVED = {"block_hashes", "chains"}


def field_names(message: type) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


SAMPLING = [
    PARAMS,
    SamplingParams(),
    SamplingParams(temperature=0.0, logit_bias={3: -math.inf}),
    SamplingParams(grammar=Grammar("json_schema", ("{}",))),
    SamplingParams(grammar=Grammar("regex", ("[a-zé]",))),
    SamplingParams(grammar=Grammar("lark", ("start: /x/",))),
    SamplingParams(grammar=Grammar("choices", ("yes", "no"))),
]
FLEET = FleetConfig(
    queue_policy="fair",
    tenant_weights={"a": 0.3},
    max_num_waiting=7,
    max_executor_losses=4,
    executor_return_s=0.1,
)


@pytest.mark.parametrize(
    ("value", "message", "decode"),
    [
        (CONFIG, journal.CoreConfig, decode_config),
        (make_config(), journal.CoreConfig, decode_config),
        (FLEET, journal.FleetConfig, decode_fleet_config),
        (SCHEDULING, journal.JournaledSchedulingParams, decode_scheduling_params),
        (SchedulingParams(), journal.JournaledSchedulingParams, decode_scheduling_params),
        *((params, journal.JournaledSamplingParams, decode_sampling_params) for params in SAMPLING),
    ],
)
def test_value_is_the_same_when_it_comes_back(
    value: Any,  # noqa: ANN401
    message: type[Any],
    decode: Callable[[Any], object],
) -> None:
    encoded = message()
    encode_fields(value, encoded)

    assert decode(encoded) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (SchedulerConfig, journal.CoreConfig),
        (FleetConfig, journal.FleetConfig),
        (Assignment, journal.JournaledAssignment),
        (SamplingParams, journal.JournaledSamplingParams),
        (BeamParams, journal.JournaledBeamParams),
        (PoolingParams, journal.JournaledPoolingParams),
        (VectorSizes, journal.JournaledVectorSizes),
        (SchedulingParams, journal.JournaledSchedulingParams),
    ],
)
def test_message_has_every_field_when_one_is_added(value: type, message: type) -> None:
    assert field_names(message) == {field.name for field in fields(value)}


def test_request_message_has_every_field_that_matters_when_one_is_added() -> None:
    names = {field.name for field in fields(Request)} - SET_BY_READMIT - OF_A_CORE - OF_AN_END

    assert field_names(journal.JournaledRequest) == names | {"prompt_token_ids"}


def test_sequence_message_has_every_field_that_matters_when_one_is_added() -> None:
    names = {field.name for field in fields(Sequence)} - OF_A_ROW - DERIVED
    names -= {"token_ids", "num_prompt_tokens", "status"}

    message = field_names(journal.JournaledSequence)
    assert message == names | {"output_token_ids", "is_finished"}


# -- events and effects ------------------------------------------------------------------------

EVENTS: list[events.Event] = [
    events.RequestAborted("r"),
    events.ExecutorJoined("a:1", 2**60, CONFIG, num_credits=3, last_step_id=4, scheduler_epoch=5),
    events.ExecutorConnected("a:1"),
    events.ExecutorDoubted("a:1", is_doubtful=True),
    events.ExecutorDraining("a:1"),
    events.ExecutorDrainExpired("a:1"),
    events.ExecutorUndrained("a:1"),
    events.ExecutorLost("a:1", LossCause.SILENT, "it does not answer"),
    events.TenantsWeighed({"a": 0.3}),
    events.TenantsWeighed({}),
    events.AdapterRegistered("sql@0123456789abcdef"),
    events.AdapterLoaded("executor:1", "sql@0123456789abcdef"),
    events.AdapterLoaded("executor:1", "sql@0123456789abcdef", "it has no weights"),
    events.Tick(),
    events.Tick(looks_everywhere=True),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_is_the_same_when_it_comes_back(event: events.Event) -> None:
    entry = journal.JournalEntry()
    encode_event(event, None, entry)

    copy = journal.JournalEntry.FromString(entry.SerializeToString())
    assert decode_event(copy) == event


def test_unsent_step_is_the_same_when_it_comes_back() -> None:
    event = events.StepCompleted("a:1", StepOutcome(9, StepStatus.REFUSED), was_sent=False)
    entry = journal.JournalEntry()
    encode_event(event, None, entry)

    copy = decode_event(entry)

    assert isinstance(copy, events.StepCompleted)
    assert (copy.address, copy.was_sent) == ("a:1", False)
    assert (copy.outcome.step_id, copy.outcome.status) == (9, StepStatus.REFUSED)


def test_step_is_decoded_from_its_message() -> None:
    result = executor.StepResult(step_id=9, status=executor.STEP_STATUS_FAILED)
    outcome = decode_result(result, 2)
    entry = journal.JournalEntry()
    encode_event(events.StepCompleted("a:1", outcome), ReceivedResult(result, 2), entry)

    copy = decode_event(entry)

    assert entry.step_completed.result == result.SerializeToString()
    assert isinstance(copy, events.StepCompleted)
    assert copy.was_sent
    assert (copy.outcome.step_id, copy.outcome.status) == (9, StepStatus.FAILED)
    assert copy.outcome.error == outcome.error


def test_part_is_decoded_from_its_message() -> None:
    result = executor.StepResult(
        step_id=9,
        status=executor.STEP_STATUS_PARTIAL,
        sampled_token_ids=np.array([5, 6], "<i4").tobytes(),
        sampled_offsets=np.array([0, 2, 2], "<i4").tobytes(),
    )
    event = events.StepProgressed("a:1", decode_part(result, 2))
    entry = journal.JournalEntry()
    encode_event(event, ReceivedResult(result, 2), entry)

    copy = decode_event(entry)

    assert isinstance(copy, events.StepProgressed)
    assert (copy.address, copy.part.step_id) == ("a:1", 9)
    assert copy.part.counts.tolist() == [2, 0]
    assert copy.part.token_ids.tolist() == [5, 6]


def test_every_event_has_a_message_when_one_is_added() -> None:
    tested = {type(event) for event in EVENTS} | {
        events.RequestSubmitted,
        events.StepCompleted,
        events.StepProgressed,
    }

    assert tested == set(get_args(events.Event))


def test_every_effect_has_a_message_when_one_is_added() -> None:
    oneof = journal.JournaledEffect.DESCRIPTOR.oneofs_by_name["effect"]
    names = {field.name.replace("_", "") for field in oneof.fields}

    assert names == {kind.__name__.lower() for kind in get_args(effects.Effect)}


def test_wake_is_absent_when_the_scheduler_wants_none() -> None:
    message = journal.JournaledEffect()
    encode_effect(effects.WakeAt(None), message)

    assert message.WhichOneof("effect") == "wake_at"
    assert not message.wake_at.HasField("at_ns")


def a_request_with_a_past() -> Request:
    request = Request.create(
        "r",
        [1, 2, 3],
        PARAMS,
        arrival=7,
        seed=-5,
        resume_token_ids=[[4]],
        scheduling=SCHEDULING,
        encoder_token_ids=[8, 9],
    )
    request.client_key = 2**40
    for number, name in enumerate(vars_of_counters()):
        setattr(request, name, number + 2)
    request.is_protected = True
    tokens = np.array([1, 2, 3, 5, 6], np.int32)
    finished = Sequence(request, 3, tokens, 3, 11, SequenceStatus.FINISHED)
    request.sequences.append(finished)
    finished.finish_reason = FinishReason.STOP
    finished.stop_token_id, finished.settles_at_step = 0, 12
    finished.cumulative_logprob = -0.1
    finished.scored = [ScoredToken(3, 5, -0.7, 2, [(1, -0.1), (2, -0.3)])]
    request.search = a_search()
    return request


def vars_of_counters() -> list[str]:
    return [field.name for field in fields(Request) if field.name.startswith("num_")]


def a_search() -> BeamSearch:
    search = BeamSearch(
        BeamParams(4, 0.6, EarlyStopping.NEVER),
        n=2,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=frozenset({4}),
    )
    for _ in range(3):
        candidates = [[(token, -0.1 * token - 0.7) for token in range(8)]] * len(search.state.live)
        search.advance(candidates)
    return search


def test_request_is_the_same_when_it_comes_back() -> None:
    request = a_request_with_a_past()

    copy = decode_request(encode_request(request))

    assert encode_request(copy) == encode_request(request)
    left_out = SET_BY_READMIT | OF_A_CORE | OF_AN_END
    for field in fields(Request):
        if field.name not in left_out | {"encoder_token_ids", "sequences", "search"}:
            assert getattr(copy, field.name) == getattr(request, field.name), field.name
    assert copy.encoder_token_ids is not None
    assert copy.encoder_token_ids.tolist() == [8, 9]
    for ours, theirs in zip(request.sequences, copy.sequences, strict=True):
        assert theirs.request is copy
        assert np.array_equal(theirs.token_ids, ours.token_ids)
        for field in fields(Sequence):
            if field.name not in {"request", "token_ids"}:
                assert getattr(theirs, field.name) == getattr(ours, field.name), field.name


def test_beam_search_goes_on_alike_when_it_comes_back() -> None:
    request = a_request_with_a_past()
    copy = decode_request(encode_request(request))
    assert request.search is not None
    assert copy.search is not None
    assert copy.search.state == request.search.state
    candidates = [[(token, -0.2 * token - 0.3) for token in range(8)]] * len(
        request.search.state.live
    )

    assert copy.search.advance(candidates) == request.search.advance(candidates)
    assert copy.search.hypotheses == request.search.hypotheses


def test_decode_refuses_request_when_it_has_no_sequence() -> None:
    with pytest.raises(ValueError, match="has no sequence"):
        decode_request(journal.JournaledRequest(request_id="r"))
