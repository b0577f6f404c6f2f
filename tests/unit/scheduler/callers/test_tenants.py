"""Tests the tenants' file, and the limits that it sets."""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.callers import (
    NO_LIMITS,
    TenantLimits,
    Tenants,
    check_model,
    check_prompt,
    check_request,
    may_use_model,
    parse_tenants,
    read_tenants,
)
from scheduler_service.scheduler.values import BeamParams, Request, SamplingParams, SchedulingParams
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_common import FilesUnusable
from splitserve_contract import DomainError

NUM_EXAMPLES = int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "75"))
EVERYTHING = """
weight = 2
min_priority = -5
max_priority = 7
requests_per_minute = 0.5
tokens_per_minute = 1000
max_concurrent_requests = 3
max_prompt_tokens = 4
max_output_tokens = 5
max_sequences = 6
adapters = ["a*", "b"]
models = []
"""
ALL_LIMITS = TenantLimits(2, -5, 7, 0.5, 1000, 3, 4, 5, 6, ("a*", "b"), ())


def test_every_field_can_be_said() -> None:
    tenants = parse_tenants(f"[tenants.a]{EVERYTHING}")
    assert tenants.limits("a") == ALL_LIMITS
    assert all(
        getattr(ALL_LIMITS, field.name) != getattr(NO_LIMITS, field.name)
        for field in fields(TenantLimits)
    )


def test_tenant_has_the_default_when_nothing_is_said() -> None:
    tenants = parse_tenants(f"[default]{EVERYTHING}[tenants.'team b']\nmax_sequences = 9\n")
    assert tenants.limits("nobody") == ALL_LIMITS
    assert tenants.limits("team b") == replace(ALL_LIMITS, max_sequences=9)


def test_nobody_has_limits_when_the_file_is_empty() -> None:
    assert parse_tenants("") == Tenants(NO_LIMITS, {})


def test_weights_are_against_that_of_others() -> None:
    text = "[default]\nweight = 2\n[tenants.a]\nweight = 6\n[tenants.b]\nmax_sequences = 1\n"
    assert parse_tenants(text).weights == {"a": 3.0, "b": 1.0}


def test_example_of_the_document_has_every_field() -> None:
    document = (Path(__file__).parents[4] / "docs" / "security.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    tenants = parse_tenants(example)
    others = tenants.limits("others"), tenants.limits("team-a")
    assert [
        field.name
        for field in fields(TenantLimits)
        if all(getattr(limits, field.name) == field.default for limits in others)
    ] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x", "not valid TOML: "),
        ("[tenant.a]", "'tenant' is not known; allowed: [default], [tenants.NAME]"),
        ("default = 5", "default is not a table; allowed: [default] with one line per field"),
        ("tenants = []", "tenants is not a table"),
        ("[tenants]\na = 5", "tenants.a is not a table"),
        ('[tenants."a\\nb"]', "tenants has 'a\\nb'; allowed: a text of 1 to 128 printable"),
        ('[tenants.""]', "tenants has ''; allowed"),
        ("[tenants.a]\nrequests = 5", "tenants.a has 'requests'; allowed: weight, min_priority"),
        ("[default]\nweight = 0", "default.weight is '0'; allowed: a number from 0.000001 to 1000"),
        ("[default]\nweight = nan", "default.weight is 'nan'"),
        ("[default]\nweight = inf", "default.weight is 'inf'"),
        ("[default]\nweight = true", "default.weight is 'True'"),
        ("[default]\nmin_priority = 1.0", "min_priority is '1.0'; allowed: an integer from -100"),
        ("[default]\nmax_priority = 101", "max_priority is '101'; allowed: an integer from -100"),
        ("[default]\nmin_priority = true", "min_priority is 'True'"),
        ("[default]\nmax_priority = -1\nmin_priority = 0", "allowed: at most max_priority"),
        ("[default]\nrequests_per_minute = 0", "requests_per_minute is '0'; allowed: a number abo"),
        ("[default]\ntokens_per_minute = '5'", "tokens_per_minute is '5'; allowed: a number above"),
        ("[default]\nmax_sequences = 0", "max_sequences is '0'; allowed: an integer from 1 to"),
        (f"[default]\nmax_sequences = {2**60}", "max_sequences is"),
        ("[default]\nmodels = 'm'", "models is 'm'; allowed: a list of non-empty strings"),
        (
            "[default]\nadapters = ['']",
            "adapters is \"['']\"; allowed: a list of non-empty strings",
        ),
        ("[default]\nadapters = [5]", "adapters is '[5]'; allowed: a list of non-empty strings"),
    ],
)
def test_file_is_refused_by_table_and_field_when_it_is_wrong(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "tenants.toml").write_text(text)
    with pytest.raises(FilesUnusable) as raised:
        read_tenants(tmp_path / "tenants.toml")
    assert problem in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/tenants.toml: ")


@pytest.mark.parametrize("content", [b"\xff", b"a = " + b"[" * 100_000])
def test_file_is_refused_when_it_is_no_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_bytes(content)
    with pytest.raises(FilesUnusable, match=r"^[^\n]*tenants\.toml: [^\n]+\Z"):
        read_tenants(tmp_path / "tenants.toml")


@settings(max_examples=NUM_EXAMPLES)
@given(
    st.sampled_from([field.name for field in fields(TenantLimits)]),
    st.integers() | st.floats() | st.booleans().map(lambda value: str(value).lower()),
)
def test_number_is_taken_or_refused_by_name(name: str, value: float | str) -> None:
    said = ""
    try:
        tenants = parse_tenants(f"[tenants.a]\n{name} = {value}\n")
    except ValueError as error:
        said = str(error)
    assert (
        f"tenants.a.{name} is " in said
        or "tenants.a.min_priority is " in said
        or getattr(tenants.limits("a"), name) == value
    )


def a_request(params: SamplingParams, scheduling: SchedulingParams) -> Request:
    return Request.create("r", [1], params, arrival=1, seed=1, scheduling=scheduling)


CASES: list[tuple[dict[str, Any], SamplingParams, SchedulingParams]] = [
    ({"max_output_tokens": 4}, SamplingParams(max_tokens=5), SchedulingParams()),
    ({"max_output_tokens": 4}, SamplingParams(min_tokens=5), SchedulingParams()),
    ({"max_sequences": 2}, SamplingParams(n=3), SchedulingParams()),
    ({"max_sequences": 2}, SamplingParams(best_of=3), SchedulingParams()),
    ({"max_sequences": 2}, SamplingParams(beam=BeamParams(3)), SchedulingParams()),
    ({"min_priority": 0}, SamplingParams(), SchedulingParams(priority=-1)),
    ({"max_priority": 0}, SamplingParams(), SchedulingParams(priority=1)),
    ({"adapters": ("a-*",)}, SamplingParams(), SchedulingParams(adapter="b-1")),
]


@pytest.mark.parametrize(("limits", "params", "scheduling"), CASES)
def test_refusal_names_its_limit(
    limits: dict[str, Any], params: SamplingParams, scheduling: SchedulingParams
) -> None:
    request = a_request(params, scheduling)
    with pytest.raises(DomainError) as caught:
        check_request(request, TenantLimits(**limits), "t")
    assert [caught.value.limit] == list(limits)
    assert "tenant 't'" in caught.value.message
    check_request(request, NO_LIMITS, "t")


def test_request_passes_when_it_is_at_every_limit() -> None:
    limits = TenantLimits(
        min_priority=-3,
        max_priority=-3,
        max_output_tokens=5,
        max_sequences=2,
        adapters=("x", "a-?"),
    )
    params = SamplingParams(max_tokens=5, min_tokens=5, n=2)
    check_request(a_request(params, SchedulingParams(priority=-3, adapter="a-1")), limits, "t")
    check_request(a_request(params, SchedulingParams(priority=-3)), limits, "t")


@pytest.mark.parametrize("name", ["prompt_token_ids", "encoder_token_ids"])
def test_prompt_is_refused_when_it_is_longer_than_the_tenants(name: str) -> None:
    limits, message = TenantLimits(max_prompt_tokens=3), api.GenerateRequest()
    getattr(message, name).extend([1, 2, 3])
    check_prompt(message, limits, "t")
    getattr(message, name).append(4)
    with pytest.raises(DomainError) as caught:
        check_prompt(message, limits, "t")
    assert (caught.value.reason, caught.value.limit) == ("PROMPT_TOO_LONG", "max_prompt_tokens")


def test_model_is_one_of_the_patterns() -> None:
    limits = TenantLimits(models=("qwen-*", "Llama"))
    assert [may_use_model(limits, name) for name in ("qwen-7b", "Llama", "llama", "x")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(DomainError) as caught:
        check_model(limits, "t", "x")
    assert (caught.value.reason, caught.value.limit) == ("CALLER_NOT_ALLOWED", "models")
    assert not may_use_model(TenantLimits(models=()), "x")
    check_model(NO_LIMITS, "t", "x")
