"""A start that ends in serving says nothing above INFO, whoever it is that might speak."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_service.backends import AUTO, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import load_engine
from splitserve_options import options
from tests.support.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("native_library")


class _Urgent(logging.Handler):
    """What any logger says above INFO."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname} {record.name} {record.getMessage()}")


@pytest.fixture
def urgent() -> Iterator[list[str]]:
    """Python's own warnings are errors in all tests."""
    # What goes to that of transformers goes no further.
    loggers = (logging.getLogger(), logging.getLogger("transformers"))
    handler = _Urgent()
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.messages
    for logger in loggers:
        logger.removeHandler(handler)


# Every architecture, every data type, with and without rounding; and what cannot be rounded.
_STARTS = [
    ("llama", "float32", False, {}),
    ("llama", "bfloat16", True, {"tie_word_embeddings": True}),
    ("llama", "bfloat16", False, {"hidden_act": "gelu"}),
    ("qwen2", "bfloat16", False, {}),
    ("qwen3", "float32", True, {}),
    ("qwen3_moe", "bfloat16", False, {}),
    ("qwen3_moe", "float32", True, {}),
    ("mistral", "bfloat16", False, {}),
    ("gemma2", "bfloat16", False, {}),
    ("gemma2", "float32", True, {}),
    ("phi3", "bfloat16", True, {}),
    ("olmo2", "float32", False, {}),
    ("gpt_neox", "bfloat16", True, {}),
    ("gpt_oss", "float32", False, {}),
    ("deepseek_v3", "bfloat16", False, {}),
    # They have the parts of a Llama.
    ("smollm3", "bfloat16", True, {}),
    ("granite", "float32", False, {}),
    ("ernie4_5", "bfloat16", False, {}),
]


@pytest.mark.cases(8)
@pytest.mark.parametrize(("architecture", "dtype", "is_int8", "overrides"), _STARTS)
def test_start_is_quiet_when_the_model_is_served(
    tmp_path: Path,
    urgent: list[str],
    capfd: pytest.CaptureFixture[str],
    architecture: str,
    dtype: str,
    is_int8: bool,
    overrides: dict[str, Any],
) -> None:
    make_tiny_model(architecture, tmp_path, overrides=overrides)
    capfd.readouterr()
    config = ModelConfig(str(tmp_path), dtype=dtype)
    name = AUTO
    compute = choose_compute(lambda: load_model(config), name, None, is_int8=is_int8)
    assert (compute.is_int8, urgent, capfd.readouterr().err) == (is_int8, [], "")


@pytest.mark.usefixtures("native_library")
def test_start_is_quiet_when_the_model_is_the_bundled_one(urgent: list[str]) -> None:
    values = options.parse("executor", ["--num-device-blocks", "4", "--device", "cpu"], {})
    engine = load_engine(ExecutorConfig.from_options(values), executor_epoch=1)
    assert engine.info.compute.startswith("native decoder")
    assert engine.info.slow_compute_reason == ""
    assert urgent == []


@pytest.mark.parametrize(
    ("architecture", "dtype", "what", "instead"),
    [
        ("gpt_neox", "float32", "native_decoder_not_used", "using native attention"),
        ("llama", "float16", "attention_backends_refused", "using plain torch"),
    ],
)
def test_start_logs_one_line_when_the_fastest_does_not_apply(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    dtype: str,
    what: str,
    instead: str,
) -> None:
    make_tiny_model(architecture, tmp_path)
    caplog.set_level(logging.INFO, "executor_service.backends")
    config = ModelConfig(str(tmp_path), dtype=dtype)
    choose_compute(lambda: load_model(config), AUTO, None)
    lines = [r for r in caplog.records if r.name.startswith("executor_service.backends.")]
    [line] = [record.getMessage() for record in lines]
    assert line.startswith(what)
    assert "reason=" in line
    assert line.endswith(instead)
