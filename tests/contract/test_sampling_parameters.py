"""The table of numeric sampling parameters, and what each process does with it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from executor_service.steps import (
    BatchRefused,
    Feature,
    ParamRows,
    StepErrorReason,
    check_sampling_params,
)
from executor_service.steps import SamplingParams as RowParams
from scheduler_service.streams import decode_sampling_params
from splitserve.executor.v1 import executor_pb2
from splitserve.scheduler.v1 import journal_pb2, scheduler_pb2
from splitserve_cli import request_flags
from splitserve_client import BeamSearch, Model, SamplingParams, encode_sampling_params
from splitserve_contract import (
    DRAW_PARAMETERS,
    PARAMETERS,
    DomainError,
    GivenSamplingValues,
    NumericParameter,
    Range,
    SamplingValues,
)
from splitserve_gateway.generation import sampling_params
from splitserve_gateway.schemas import CompletionRequest
from splitserve_gateway.upstreams import ServedByScheduler
from tests.contract.served import make_fake_backend, make_info

# The range of each parameter as error texts have it; that of `seed` is all of int64.
ALLOWED = {
    "max_tokens": "1 or more, or absent",
    "min_tokens": "[0, inf]",
    "temperature": "[0, 100]",
    "top_k": "1 or more, or 0, -1 or absent for all",
    "top_p": "(0, 1]",
    "min_p": "[0, 1]",
    "repetition_penalty": "(0, 100]",
    "presence_penalty": "[-2, 2]",
    "frequency_penalty": "[-2, 2]",
    "num_logprobs": "[0, 20]",
    "num_prompt_logprobs": "[0, 20]",
    "n": "[1, 128]",
    "best_of": "[1, 128]",
    "beam_search.width": "[1, 16]",
    "beam_search.length_penalty": "[-10, 10]",
}
# Ranges of the step contract, which has no upper bounds but those of probabilities.
STEP_ALLOWED = {
    "min_tokens": ">= 0",
    "temperature": ">= 0",
    "top_k": ">= 1",
    "top_p": "in (0, 1]",
    "min_p": "in [0, 1]",
    "repetition_penalty": "> 0",
    "presence_penalty": "finite",
    "frequency_penalty": "finite",
    "num_logprobs": ">= 0",
    "num_prompt_logprobs": ">= 0",
}
BEAMS = "beam_search."
SERVED = ServedByScheduler(Model("m", "d", "float32", 100, 64, (1,)), None)
Case = tuple[NumericParameter, float, bool]


def edges(parameter: NumericParameter, allowed: Range) -> Iterator[Case]:
    """Values below, at and above each finite bound, and whether the range has them."""
    for bound, is_in in ((allowed.low, not allowed.open_low), (allowed.high, True)):
        if math.isinf(bound):
            continue
        inwards = math.inf if bound == allowed.low else -math.inf
        for value, is_allowed in (
            (next_value(parameter, bound, -inwards), False),
            (bound, is_in),
            (next_value(parameter, bound, inwards), True),
        ):
            yield parameter, value, is_allowed or value in parameter.off
    if parameter.off:
        yield parameter, min(parameter.off) - 1, False


def next_value(parameter: NumericParameter, bound: float, to: float) -> float:
    """The neighbour of `bound` in the type of the messages."""
    if parameter.kind is int:
        return int(bound + math.copysign(1, to))
    return float(np.nextafter(np.float32(bound), np.float32(to)))


def with_no_numbers(parameter: NumericParameter) -> list[Case]:
    no_numbers = (math.nan, math.inf, -math.inf) if parameter.kind is float else ()
    return [(parameter, value, False) for value in no_numbers]


CASES = [
    case
    for parameter in PARAMETERS
    if parameter.name in ALLOWED
    for case in (*edges(parameter, parameter.allowed), *with_no_numbers(parameter))
]
STEP_CASES = [
    case
    for parameter in PARAMETERS
    if parameter.step_range is not None
    for case in (*edges(parameter, parameter.step_range), *with_no_numbers(parameter))
    if case[1] not in parameter.off
]


def name_of(value: object) -> str:
    if isinstance(value, NumericParameter):
        return value.name
    return getattr(value, "__name__", f"{value}")


def of_client(parameter: NumericParameter, value: Any) -> SamplingParams:  # noqa: ANN401
    if parameter.name.startswith(BEAMS):
        beams = {"width": 2, parameter.name.removeprefix(BEAMS): value}
        return SamplingParams(beam_search=BeamSearch(**beams))
    return SamplingParams(**{parameter.name: value})


def of_command(parameter: NumericParameter, value: float) -> SamplingParams:
    parser = argparse.ArgumentParser()
    request_flags.add_sampling_flags(parser)
    flags = [f"--{parameter.flag}={value}"]
    if parameter.name == "beam_search.length_penalty":
        flags.append("--beam-width=2")
    return request_flags.sampling_params(parser.parse_args(flags))


def of_gateway(parameter: NumericParameter, value: float) -> SamplingParams:
    fields: dict[str, Any] = {parameter.api_name: value}
    if parameter.name.startswith(BEAMS):
        fields |= {"use_beam_search": True}
    body = CompletionRequest(**fields)
    return sampling_params(
        body, SERVED, max_tokens=body.max_tokens, num_prompt_logprobs=body.prompt_logprobs
    )


# JSON has finite numbers only.
SOURCES = [
    (source, *case)
    for case in CASES
    for source in (of_client, of_command, of_gateway)
    if source is not of_gateway or (case[0].api_name and math.isfinite(case[1]))
]


@pytest.mark.parametrize(("source", "parameter", "value", "is_allowed"), SOURCES, ids=name_of)
def test_scheduler_takes_a_parameter_exactly_when_it_is_in_range(
    source: Callable[[NumericParameter, float], SamplingParams],
    parameter: NumericParameter,
    value: float,
    is_allowed: bool,
) -> None:
    params = decode_sampling_params(encode_sampling_params(source(parameter, value)))
    if is_allowed:
        params.validate(vocab_size=100)
        return
    with pytest.raises(DomainError) as refusal:
        params.validate(vocab_size=100)
    shown = value if parameter.kind is int else f"{value:g}"
    expected = f"{parameter.name} is {shown}; allowed: {ALLOWED[parameter.name]}"
    assert (refusal.value.reason, refusal.value.message) == ("SAMPLING_PARAMS_INVALID", expected)


@pytest.mark.parametrize(("parameter", "value", "is_allowed"), STEP_CASES, ids=name_of)
def test_executor_takes_a_parameter_exactly_when_it_is_in_range(
    parameter: NumericParameter,
    value: Any,  # noqa: ANN401
    is_allowed: bool,
) -> None:
    params, info = RowParams(**{parameter.name: value}), make_info(make_fake_backend())
    if is_allowed:
        check_sampling_params(params, info, "p")
        return
    with pytest.raises(BatchRefused) as refusal:
        check_sampling_params(params, info, "p")
    allowed = STEP_ALLOWED[parameter.name]
    if value == math.inf and not allowed.startswith("in "):
        allowed = "finite"
    error = refusal.value.error
    assert (error.reason, error.field) == (StepErrorReason.MALFORMED, f"p.{parameter.name}")
    assert error.message == f"is {value}; allowed: {allowed}"


@pytest.mark.parametrize("parameter", [p for p in PARAMETERS if p.feature], ids=name_of)
def test_executor_refuses_a_parameter_when_its_feature_was_not_announced(
    parameter: NumericParameter,
) -> None:
    values: tuple[Any, ...] = (parameter.default, 2)
    neutral, other = (RowParams(**{parameter.name: value}) for value in values)
    info = make_info(make_fake_backend(frozenset()))
    check_sampling_params(neutral, info, "p")
    with pytest.raises(BatchRefused, match=Feature[parameter.feature].name) as refusal:
        check_sampling_params(other, info, "p")
    assert refusal.value.error.field == f"p.{parameter.name}"


@pytest.mark.parametrize(
    "parameter", [p for p in PARAMETERS if not p.name.startswith(BEAMS)], ids=name_of
)
def test_beam_search_takes_other_values_when_the_table_allows_them(
    parameter: NumericParameter,
) -> None:
    value = next(x for x in (1, 0, 0.5, 2) if parameter.accepts(x) and x != parameter.default)
    params = replace(of_client(parameter, value), beam_search=BeamSearch(2))
    decoded = decode_sampling_params(encode_sampling_params(params))
    if parameter.allowed_with_beams:
        decoded.validate(vocab_size=100)
        return
    with pytest.raises(DomainError, match=f"^{parameter.name} is .* with beam_search"):
        decoded.validate(vocab_size=100)


def test_columns_have_the_values_of_all_parameters_of_a_draw() -> None:
    values: dict[str, Any] = {p.name: 1 + n for n, p in enumerate(DRAW_PARAMETERS)}
    rows = ParamRows.of([RowParams(), RowParams(**values)])
    for parameter in DRAW_PARAMETERS:
        neutral = -1 if parameter.default is None else parameter.default
        column = rows.column(parameter.name)
        assert column.dtype == parameter.column
        assert column.tolist() == [neutral, values[parameter.name]]


def test_table_has_the_numbers_of_messages_and_values() -> None:
    names = {parameter.name for parameter in PARAMETERS}
    in_steps = {p.name for p in PARAMETERS if p.step_range is not None}
    beams = {BEAMS + name for name in numbers_of(scheduler_pb2.BeamSearch)}
    assert names == numbers_of(scheduler_pb2.SamplingParams) - {"ignore_eos"} | beams
    assert in_steps == numbers_of(executor_pb2.SamplingParams)
    journaled = numbers_of(journal_pb2.JournaledSamplingParams) - {"ignore_eos"}
    assert {name for name in names if not name.startswith(BEAMS)} == journaled | {"seed"}
    defaults = {field.name: field.default for field in fields(SamplingValues)}
    assert defaults == {p.name: p.default for p in PARAMETERS if p.name in defaults}
    assert [field.name for field in fields(GivenSamplingValues)] == [*defaults]


def numbers_of(message: Any) -> set[str]:  # noqa: ANN401
    return {
        field.name
        for field in message.DESCRIPTOR.fields
        if field.message_type is None and field.enum_type is None and not field.is_repeated
    }
