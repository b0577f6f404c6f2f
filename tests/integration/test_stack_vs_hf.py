"""Scheduler core, step contract and executor together: tokens equal to Hugging Face `generate`.

Float32 and greedy, for every architecture of the correctness bar, over block sizes, token budgets,
forced preemption and pipelining depths. Llama gets the full cross, the others a covering of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from executor_service.loaded_model import LoadedModel
from executor_service.memory import CacheConfig, build_runner
from executor_service.model_loader import ModelConfig, load_model
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Request
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.scheduler import Scheduler
from tests.support.hugging_face import generate_greedily, load_reference
from tests.support.in_process import InProcessEngine, output_token_ids
from tests.support.tiny_models import make_tiny_model

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "olmo2",
    "gpt_neox",
    "qwen3_moe",
)
BLOCK_SIZES = (1, 8, 16, 256)
BUDGETS = (1, 7, 64, 4096)
DEPTHS = (1, 2, 3)
NUM_OUTPUT_TOKENS = 12
SHORT_PROMPTS = (5, 23, 40)
# Three sequences that each cross into their second block of 256.
LONG_PROMPTS = (250, 252, 249)


@dataclass(frozen=True)
class Case:
    """One combination of the correctness bar."""

    block_size: int
    budget: int
    preempt: bool
    depth: int

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        return LONG_PROMPTS if self.preempt and self.block_size == 256 else SHORT_PROMPTS

    @property
    def num_blocks(self) -> int:
        """Enough for all, or one block more than the longest sequence needs."""
        needs = [-(-(n + NUM_OUTPUT_TOKENS) // self.block_size) for n in self.prompt_lens]
        return max(needs) + 1 if self.preempt else sum(needs)


def full_cross() -> list[Case]:
    return [Case(*each) for each in itertools.product(BLOCK_SIZES, BUDGETS, (False, True), DEPTHS)]


def covering(offset: int) -> list[Case]:
    """Every (block size, budget) once; preemption and depth vary with the architecture."""
    pairs = enumerate(itertools.product(BLOCK_SIZES, BUDGETS))
    return [
        Case(block_size, budget, (index + offset) % 2 == 0, DEPTHS[(index + offset) % 3])
        for index, (block_size, budget) in pairs
    ]


class Truth:
    """A tiny model, loaded by us and by Hugging Face, with the latter's answers."""

    def __init__(self, architecture: str, directory: Path) -> None:
        overrides = {"max_position_embeddings": 512}
        make_tiny_model(architecture, directory, seed=3, overrides=overrides)
        self.loaded: LoadedModel = load_model(ModelConfig(str(directory)))
        self._reference = load_reference(directory)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def prompts(self, lens: tuple[int, ...]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(5)
        vocab_size = self.loaded.vocab_size
        return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lens]

    def answer(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._answers:
            answer = generate_greedily(self._reference, prompt, NUM_OUTPUT_TOKENS)
            self._answers[key] = answer
        return self._answers[key]


@pytest.fixture(scope="module")
def truth_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Truth]:
    made: dict[str, Truth] = {}

    def get(architecture: str) -> Truth:
        if architecture not in made:
            made[architecture] = Truth(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return get


def serve(truth: Truth, case: Case) -> tuple[list[Request], Scheduler]:
    loaded = truth.loaded
    runner = build_runner(
        loaded,
        CacheConfig(case.block_size, num_device_blocks=case.num_blocks, num_host_blocks=0),
    )
    config = SchedulerConfig(
        block_size=case.block_size,
        num_device_blocks=case.num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=case.budget,
        max_model_len=512,
        max_num_waiting=8,
        vocab_size=loaded.vocab_size,
        eos_token_ids=frozenset(),
    )
    # Ever rarer, so that a prompt of many chunks gets through.
    preempt_at = frozenset({2, 4, 9, 27, 81}) if case.preempt else frozenset()
    engine = InProcessEngine(config, runner, epoch=11, depth=case.depth, preempt_at=preempt_at)
    requests = [
        Request.create(
            str(index),
            prompt,
            SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS),
            arrival=index,
            seed=index,
        )
        for index, prompt in enumerate(truth.prompts(case.prompt_lens))
    ]
    for request in requests:
        engine.scheduler.add(request)
    engine.run()
    return requests, engine.scheduler


def cases() -> list[tuple[str, Case]]:
    return [("llama", case) for case in full_cross()] + [
        (architecture, case)
        for offset, architecture in enumerate(ARCHITECTURES[1:])
        for case in covering(offset)
    ]


@pytest.mark.parametrize(("architecture", "case"), cases(), ids=lambda value: str(value))
def test_tokens_equal_hugging_face_generate(
    architecture: str, case: Case, truth_of: Callable[[str], Truth]
) -> None:
    truth = truth_of(architecture)
    requests, scheduler = serve(truth, case)
    answers = [truth.answer(prompt) for prompt in truth.prompts(case.prompt_lens)]
    assert [output_token_ids(request) for request in requests] == answers
    assert scheduler.num_free_blocks == case.num_blocks
    assert (scheduler.num_preemptions > 0) == case.preempt
