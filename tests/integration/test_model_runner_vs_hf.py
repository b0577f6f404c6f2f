"""Tokens and logprobs of the runner equal those of Hugging Face, however the work is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.model import LoadedModel
from executor_service.runner import CacheConfig, build_runner
from executor_service.steps import SamplingParams
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.support.steps.step_driver import DrivenSequence, drive

pytestmark = pytest.mark.cases(12)

SERVED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "gemma2",
    "phi3",
    "olmo2",
    "gpt_neox",
    "gpt_oss",
    "deepseek_v3",
)
# (chunk size, block size); None: whole prompts.
CUTS = ((1, 16), (7, 8), (64, 1), (None, 256), (7, 16))
PROMPT_LENGTHS = (5, 33, 70)
NUM_OUTPUT_TOKENS = 12
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Answer:
    """What Hugging Face says. `scores`: [tokens, V] logprobs of the token after each position."""

    prompt: list[int]
    output: list[int]
    scores: torch.Tensor


@dataclass(frozen=True, slots=True)
class Case:
    loaded: LoadedModel
    answers: list[Answer]


@pytest.fixture(scope="module", params=SERVED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed=1)
    answers = _ask_hugging_face(directory)
    return Case(load_model(ModelConfig(str(directory))), answers)


@torch.inference_mode()
def _ask_hugging_face(directory: Path) -> list[Answer]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    rng = random.Random(3)
    answers = []
    for length in PROMPT_LENGTHS:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            max_new_tokens=NUM_OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        scores = torch.log_softmax(model(tokens).logits[0].float(), dim=-1)
        answers.append(Answer(prompt, tokens[0, length:].tolist(), scores))
    return answers


def _drive(
    case: Case, chunk_size: int | None, block_size: int, params: SamplingParams
) -> list[DrivenSequence]:
    sequences = [
        DrivenSequence(answer.prompt, NUM_OUTPUT_TOKENS, params, start_step=2 * index)
        for index, answer in enumerate(case.answers)
    ]
    num_blocks = sum(
        -(-(len(answer.prompt) + NUM_OUTPUT_TOKENS) // block_size) for answer in case.answers
    )
    cache_config = CacheConfig(block_size, num_device_blocks=num_blocks + 3, num_host_blocks=0)
    runner = build_runner(case.loaded, cache_config)
    drive(
        runner,
        sequences,
        block_size=block_size,
        num_blocks=num_blocks + 3,
        chunk_size=chunk_size,
        seed=block_size,
    )
    return sequences


@pytest.mark.cases(5)
@pytest.mark.parametrize(("chunk_size", "block_size"), CUTS)
def test_runner_gives_hugging_face_tokens_when_work_is_cut(
    case: Case, chunk_size: int | None, block_size: int
) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=0)
    sequences = _drive(case, chunk_size, block_size, params)
    for sequence, answer in zip(sequences, case.answers, strict=True):
        assert sequence.output == answer.output
        first = len(answer.prompt) - 1
        expected = [
            answer.scores[first + step, token].item() for step, token in enumerate(answer.output)
        ]
        assert sequence.logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_runner_gives_hugging_face_prompt_logprobs_when_prefill_is_chunked(case: Case) -> None:
    params = SamplingParams(temperature=0.0, num_prompt_logprobs=2)
    sequences = _drive(case, 7, 8, params)
    for sequence, answer in zip(sequences, case.answers, strict=True):
        assert sequence.output == answer.output
        expected = {
            position: answer.scores[position - 1, answer.prompt[position]].item()
            for position in range(1, len(answer.prompt))
        }
        assert sequence.prompt_logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
