"""Adapters through scheduler core and executor: tokens equal to `generate` of PEFT.

Float32 and greedy, for every architecture of the correctness bar and all code that runs it on a
CPU. Rows with two adapters and without one share the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from executor_service.adapters import read_adapter
from executor_service.backends import AUTO, Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import NativePagedModel
from executor_service.model import torch_model
from scheduler_service.scheduler.values import Feature, PreemptionMode
from splitserve_kernels.cpu import NativeLibrary
from tests.support.covering import covering
from tests.support.models.model_pair import (
    ModelPair,
    ObservedEngine,
    generate_greedily,
    make_request,
)
from tests.support.models.peft_adapters import files_of, make_adapter

# Of each architecture, the linear layers that its second adapter changes.
ARCHITECTURES = {
    "llama": ["q_proj", "down_proj"],
    "qwen2": ["k_proj", "v_proj", "up_proj"],
    "qwen3": ["q_proj", "k_proj"],
    "mistral": ["gate_proj", "o_proj"],
    "gemma2": ["v_proj", "down_proj"],
    "phi3": ["qkv_proj"],
    "olmo2": ["q_proj", "up_proj"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "qwen3_moe": ["k_proj"],
}
WITH_NATIVE_DECODER = ("llama", "qwen2", "qwen3", "mistral")

NUM_OUTPUT_TOKENS = 12
# Two rows have the same prompt and different adapters: they must not share its blocks.
PROMPT_LENS = (23, 23, 23, 40, 5)
ADAPTERS = ("a", "b", "", "b", "a")


class Pressure(Enum):
    """What becomes of requests that are preempted; NONE: none is."""

    NONE = "none"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Case:
    """How the requests are served. `is_torch`: in plain torch, not in the fastest code."""

    architecture: str
    is_torch: bool
    block_size: int
    budget: int
    pressure: Pressure
    depth: int

    def __str__(self) -> str:
        code = "torch" if self.is_torch else "fast"
        return (
            f"{self.architecture}-{code}-block{self.block_size}-budget{self.budget}"
            f"-{self.pressure.value}-depth{self.depth}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """Pools that hold all sequences, or two blocks more than the longest needs."""
        needs = [-(-(n + NUM_OUTPUT_TOKENS) // self.block_size) for n in PROMPT_LENS]
        if self.pressure is Pressure.NONE:
            return {"num_device_blocks": sum(needs)}
        is_swap = self.pressure is Pressure.SWAP
        return {
            "num_device_blocks": max(needs) + 2,
            "num_host_blocks": sum(needs) if is_swap else 0,
            "preemption_mode": PreemptionMode.SWAP if is_swap else PreemptionMode.RECOMPUTE,
            "preempt_at": {2, 4, 9, 27, 81},
        }


class AdaptedPair:
    """A model with two adapters, run by PEFT and by us."""

    def __init__(self, pair: ModelPair, architecture: str, directory: Path) -> None:
        self.pair = pair
        self._folders = {name: directory / name for name in "ab"}
        options: dict[str, dict[str, Any]] = {
            "a": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
            "b": {"r": 3, "use_rslora": True, "target_modules": ARCHITECTURES[architecture]},
        }
        self._references = {
            name: make_adapter(pair.directory, folder, seed=ord(name), **options[name])
            for name, folder in self._folders.items()
        }
        self._answers: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self._in_torch = Compute(pair.served, torch_model, "torch", 16)
        self._fast: Compute | None = None

    def answer(self, prompt: list[int], adapter: str) -> list[int]:
        """Returns the tokens of PEFT, or of the model alone."""
        if not adapter:
            return self.pair.answer(prompt, NUM_OUTPUT_TOKENS)
        key = (adapter, tuple(prompt))
        if key not in self._answers:
            reference = self._references[adapter]
            self._answers[key] = generate_greedily(reference, prompt, NUM_OUTPUT_TOKENS)
        return self._answers[key]

    def engine(self, case: Case) -> ObservedEngine:
        """Returns an engine that has both adapters."""
        compute = self._in_torch if case.is_torch else self._fast_compute()
        engine = ObservedEngine(
            self.pair,
            compute=compute,
            depth=case.depth,
            block_size=case.block_size,
            max_num_batched_tokens=case.budget,
            features=frozenset(Feature),
            max_adapters=2,
            **case.options,
        )
        engine.runner.adapters.by_name = {
            name: read_adapter(name, files_of(folder), compute.loaded, max_rank=16)
            for name, folder in self._folders.items()
        }
        return engine

    def _fast_compute(self) -> Compute:
        if self._fast is None:
            config = ModelConfig(str(self.pair.directory))
            self._fast = choose_compute(lambda: load_model(config), AUTO, None)
            assert self._fast.why_slow is None
        return self._fast


@pytest.fixture(scope="module")
def adapted_pair_of(
    pair_of: Callable[[str], ModelPair], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], AdaptedPair]:
    """Makes the pair of an architecture when it is first asked for."""

    @functools.cache
    def get(architecture: str) -> AdaptedPair:
        directory = tmp_path_factory.mktemp("adapters")
        return AdaptedPair(pair_of(architecture), architecture, directory)

    return get


def cases() -> list[Case]:
    options = {
        "architecture": tuple(ARCHITECTURES),
        "is_torch": (False, True),
        "block_size": (1, 8, 16),
        "budget": (7, 64),
        "pressure": tuple(Pressure),
        "depth": (1, 2, 3),
    }
    return [Case(**case) for case in covering(options, strength=2)]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_tokens_equal_those_of_peft_when_rows_have_two_adapters_and_none(
    case: Case,
    adapted_pair_of: Callable[[str], AdaptedPair],
    native_library: NativeLibrary,
) -> None:
    adapted = adapted_pair_of(case.architecture)
    engine = adapted.engine(case)
    # The same length gives the same prompt.
    prompts = [prompt for length in PROMPT_LENS for prompt in adapted.pair.prompts([length])]

    outputs = engine.serve(
        *(
            make_request(index, prompt, adapter=adapter, max_tokens=NUM_OUTPUT_TOKENS)
            for index, (prompt, adapter) in enumerate(zip(prompts, ADAPTERS, strict=True))
        )
    )

    answers = [adapted.answer(*asked) for asked in zip(prompts, ADAPTERS, strict=True)]
    assert outputs == [[answer] for answer in answers]
    # Those of the same prompt differ.
    assert len(set(map(tuple, answers[:3]))) == 3
    assert (engine.core.num_preemptions > 0) == (case.pressure is not Pressure.NONE)
    assert (engine.core.num_swapped_out > 0) == (case.pressure is Pressure.SWAP)
    if case.pressure is Pressure.NONE and case.budget == 64:
        assert max(len(plan.work.row_ids) for plan in engine.core.plans) == len(ADAPTERS)
    if not case.is_torch and case.architecture in WITH_NATIVE_DECODER:
        assert isinstance(engine.runner.model, NativePagedModel)
