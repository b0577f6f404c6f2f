"""generation_config.json: what it recommends, and that nothing in it costs more than itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executor_service.checkpoint import (
    GenerationConfig,
    ModelConfig,
    load_model,
    read_generation_config,
)
from executor_service.steps import DefaultSampling
from tests.support.models.tiny_models import EOS_TOKEN_ID, make_tiny_model

VOCAB_SIZE = 100
GOOD: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
}


def read(tmp_path: Path, content: object) -> GenerationConfig:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "generation_config.json").write_text(text)
    return read_generation_config(tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("content", "sampling"),
    [
        ({**GOOD, "do_sample": True}, DefaultSampling(**GOOD)),
        # Whoever writes a temperature means it.
        (GOOD, DefaultSampling(**GOOD)),
        ({**GOOD, "do_sample": False}, DefaultSampling(**{**GOOD, "temperature": 0.0})),
        ({"do_sample": False}, DefaultSampling(temperature=0.0)),
        ({"do_sample": True}, DefaultSampling()),
        ({}, DefaultSampling()),
        ({"top_k": 0, "temperature": None}, DefaultSampling()),
        ({"top_k": -1, "temperature": 1}, DefaultSampling(temperature=1)),
    ],
)
def test_sampling_is_what_the_file_says_when_it_makes_sense(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: dict[str, object],
    sampling: DefaultSampling,
) -> None:
    assert read(tmp_path, content).sampling == sampling
    assert not caplog.records


WRONG = [
    ("temperature", '"hot"'),
    ("temperature", "-0.5"),
    ("temperature", "101"),
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", "true"),
    ("temperature", "1" + "0" * 400),
    ("top_k", "-2"),
    ("top_k", "20.5"),
    ("top_k", '"20"'),
    ("top_k", "4294967296"),
    ("top_p", "0"),
    ("top_p", "1.5"),
    ("top_p", "[0.9]"),
    ("min_p", "-0.1"),
    ("min_p", "{}"),
    ("repetition_penalty", "0"),
    ("repetition_penalty", "NaN"),
    ("do_sample", '"yes"'),
    ("eos_token_id", '"</s>"'),
    ("eos_token_id", "[7, 100]"),
    ("eos_token_id", "[7, true, -1]"),
    ("eos_token_id", "2.0"),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{f} {v[:20]}" for f, v in WRONG])
def test_field_costs_itself_and_one_line_when_it_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, value: str
) -> None:
    right = {"eos_token_id": 5, "do_sample": True, **GOOD}
    text = json.dumps({**right, field: "WRONG"}).replace('"WRONG"', value)
    config = read(tmp_path, text)
    left = {name: number for name, number in GOOD.items() if name != field}
    assert config.sampling == DefaultSampling(**left)
    expected_eos = {"eos_token_id": (7,) if "7" in value else None}
    assert config.eos_token_ids == expected_eos.get(field, (5,))
    (record,) = caplog.records
    line = record.getMessage()
    assert f"field={field} " in line
    assert "allowed" in line
    assert "\n" not in line
    assert len(line) < 250


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"[1]", b"7", b"null", b"[" * 100_000, b" " * 2**21, b'"\xff"', None],
)
def test_file_costs_itself_and_one_line_when_it_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    path = tmp_path / "generation_config.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert read_generation_config(tmp_path, VOCAB_SIZE) == GenerationConfig()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": 0.5, "eos_token_id": "x", "num_beams": 3, "early_stopping": "maybe"}',
        '{"temperature": 0.5, "max_new_tokens": -4, "eos_token_id": 9999}',
        "[1]",
    ],
)
def test_model_is_loaded_when_its_generation_config_is_broken(tmp_path: Path, text: str) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    loaded = load_model(ModelConfig(str(tmp_path)))
    assert loaded.eos_token_ids == (EOS_TOKEN_ID,)
    temperature = 0.5 if text.startswith("{") else None
    assert loaded.default_sampling == DefaultSampling(temperature=temperature)
