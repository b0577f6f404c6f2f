"""Tests that requests are refused for their size before they are copied or decoded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
from google.protobuf.message import Message

from scheduler_service.config import ClusterConfig
from scheduler_service.driver import Driver
from scheduler_service.request_limits import check_lengths, message_bytes, most_message_bytes
from scheduler_service.scheduler.values import (
    MAX_BAD_WORD_TOKENS,
    MAX_CHOICES,
    MAX_ENTRIES,
    MAX_GRAMMAR_BYTES,
    Request,
)
from scheduler_service.service import SchedulerServicer
from scheduler_service.streams import Delivery, UnreadLimits, decode_sampling_params
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_contract import MAX_SEQUENCES, DomainError
from tests.support.core.driver import make_config

MAX_LEN = 100
CONFIG = make_config(max_model_len=MAX_LEN, num_device_blocks=1000)
NUM_ENTRIES = 200_000
# Whoever copies so many entries takes four times as much.
COPY_BYTES = 200_000
MIB = 2**20
# In grpc.aio a context cannot be made; Generate uses none.
CONTEXT: grpc.aio.ServicerContext = None


def a_request() -> api.GenerateRequest:
    params = api.SamplingParams(n=2, logit_bias={1: 1.0})
    params.bad_words_token_ids.add(token_ids=[1])
    params.grammar.choices.texts.append("a")
    request = api.GenerateRequest(prompt_token_ids=[1], sampling_params=params)
    request.resume_sequences.add(index=0, token_ids=[1])
    return request


def long_lists() -> Iterator[tuple[str, api.GenerateRequest]]:
    """A request for each list in it, however deep, that is very long there."""
    for path in paths_of_lists(a_request()):
        request = a_request()
        *parents, name = path
        message: Any = request
        for parent in parents:
            place = getattr(message, parent)
            message = place[0] if isinstance(place, list) or hasattr(place, "append") else place
        fill(getattr(message, name))
        yield ".".join(path), request


def paths_of_lists(message: Message) -> Iterator[tuple[str, ...]]:
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            yield (field.name,)
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        place = getattr(message, field.name)
        inner = (place or [place.add()])[0] if field.is_repeated else place
        for path in paths_of_lists(inner):
            yield (field.name, *path)


def fill(place: Any) -> None:  # noqa: ANN401
    if hasattr(place, "add"):
        place.extend([place.add()] * NUM_ENTRIES)
    elif hasattr(place, "extend"):
        is_text = any(isinstance(entry, str) for entry in place)
        place.extend(["a"] * NUM_ENTRIES if is_text else range(NUM_ENTRIES))
    else:
        place.update(dict.fromkeys(range(NUM_ENTRIES), 1.0))


class _Cluster:
    """As much of a Driver as a request needs that is refused when it is decoded."""

    served = SimpleNamespace(largest_config=CONFIG, model=None)
    delivery = Delivery(UnreadLimits(MIB, MIB), lambda _stream: None)

    def check_accepting(self) -> None:
        """Everything is welcome."""

    def client_stream(self, _stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def refused(self, _refused: object) -> None:
        """Nobody watches."""

    def next_arrival(self) -> int:
        return 1

    def now_ns(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("name", "request_"), [pytest.param(*case, id=case[0]) for case in long_lists()]
)
async def test_long_list_is_refused_without_a_copy(
    name: str, request_: api.GenerateRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a request was made of it")

    monkeypatch.setattr(Request, "create", create)
    servicer = SchedulerServicer(cast("Driver", _Cluster()))
    tracemalloc.start()
    try:
        with pytest.raises(DomainError) as caught:
            await anext(servicer.Generate(request_, CONTEXT))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < COPY_BYTES
    assert str(NUM_ENTRIES)[:3] in caught.value.message


def at_the_limit() -> api.GenerateRequest:
    params = api.SamplingParams(
        logit_bias=dict.fromkeys(range(MAX_ENTRIES["logit_bias"]), 1.0),
        stop_token_ids=range(MAX_ENTRIES["stop_token_ids"]),
        allowed_token_ids=[2**28 - 1] * MAX_ENTRIES["allowed_token_ids"],
    )
    num_words = MAX_ENTRIES["bad_words_token_ids"]
    for _ in range(num_words):
        params.bad_words_token_ids.add(token_ids=[2**28 - 1] * (MAX_BAD_WORD_TOKENS // num_words))
    text = "x" * (MAX_GRAMMAR_BYTES // MAX_CHOICES)
    params.grammar.choices.texts.extend([text] * MAX_CHOICES)
    request = api.GenerateRequest(
        prompt_token_ids=[1] * (MAX_LEN - 1),
        resume_token_ids=[1] * MAX_LEN,
        encoder_token_ids=[1] * CONFIG.num_device_slots,
        sampling_params=params,
    )
    for index in range(MAX_SEQUENCES):
        request.resume_sequences.add(index=index, token_ids=[1] * MAX_LEN)
    return request


def test_sizes_are_allowed_when_they_are_at_the_limits() -> None:
    request = at_the_limit()
    check_lengths(request, CONFIG)
    decode_sampling_params(request.sampling_params)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("prompt_token_ids", "PROMPT_TOO_LONG"),
        ("resume_token_ids", "SAMPLING_PARAMS_INVALID"),
        ("encoder_token_ids", "NEVER_FITS_KV_CACHE"),
    ],
)
def test_size_is_refused_when_it_is_above_the_limit(field: str, reason: str) -> None:
    request = at_the_limit()
    getattr(request, field).append(1)
    with pytest.raises(DomainError) as caught:
        check_lengths(request, CONFIG)
    assert caught.value.reason == reason


# -- bytes -------------------------------------------------------------------------------------


def test_message_has_room_for_the_largest_request() -> None:
    num_tokens = CONFIG.num_device_slots
    largest = at_the_limit()
    largest.prompt_token_ids[:] = [2**28 - 1] * num_tokens
    del largest.encoder_token_ids[:]
    for name in ("request_id", "tenant", "adapter", "cache_salt"):
        setattr(largest, name, "\u4e2d" * 128)
    session = api.SessionRequest(submit=api.SessionSubmit(handle=-1, request=largest))
    assert session.ByteSize() <= message_bytes(CONFIG, 4 * MIB) < session.ByteSize() + 256 * 1024


def test_message_limit_counts_all_sequences_with_a_window() -> None:
    window = replace(CONFIG, sliding_window=16, num_device_blocks=100)
    assert message_bytes(window, 4 * MIB) == 256 * 1024 + 4 * MAX_SEQUENCES * MAX_LEN


def test_message_limit_is_usual_for_short_models() -> None:
    assert most_message_bytes(None) == most_message_bytes(1000) == 4 * MIB
    assert most_message_bytes(2 * MIB) == 8 * MIB + 256 * 1024
    assert most_message_bytes(2**31 - 1) == 64 * MIB
    assert message_bytes(replace(CONFIG, max_model_len=10 * MIB), 4 * MIB) == 4 * MIB


def test_cluster_takes_the_usual_message_when_it_knows_no_executor() -> None:
    cluster = Driver(ClusterConfig(max_model_len=2 * MIB), 1, lambda: None)
    assert cluster.served.max_message_bytes == most_message_bytes(2 * MIB)
