"""A tiny model twice: run by Hugging Face, and by the executor, alone or below a scheduler core."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from executor_service.backends import Compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import KVCache
from executor_service.model import LoadedModel, MakeModel, build_input_batch
from executor_service.runner import CacheConfig, build_runner
from executor_service.steps import RowGrammars
from executor_service.steps import SamplingParams as ExecutorParams
from scheduler_service.scheduler.values import (
    BeamParams,
    EarlyStopping,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    StepEvents,
    StepPlan,
)
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import EngineWithQueue
from tests.support.core.in_process import InProcessEngine
from tests.support.models.tiny_models import auto_class, make_tiny_model
from tests.support.steps.step_driver import Row, make_step

_EARLY_STOPPING: Mapping[EarlyStopping, bool | str] = MappingProxyType(
    {
        EarlyStopping.HEURISTIC: False,
        EarlyStopping.ALWAYS: True,
        EarlyStopping.NEVER: "never",
    }
)


def load_reference(directory: Path) -> Any:  # noqa: ANN401
    """The model as transformers runs it, in the checkpoint's data type."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    # Some versions choose an attention for these models that ignores the cap.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    attention = {"attn_implementation": "eager"} if capped else {}
    return auto_class(config).from_pretrained(directory, **attention)


def generate_greedily(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:  # noqa: ANN401
    """The `num_tokens` tokens after `prompt`; nothing ends it earlier."""
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    assert len(token_ids) == num_tokens
    return token_ids


@dataclass(frozen=True, slots=True)
class BeamQuestion:
    """Parameters of a beam search."""

    prompt: list[int]
    params: BeamParams
    n: int
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


def generate_beams(reference: Any, question: BeamQuestion) -> tuple[list[list[int]], list[float]]:  # noqa: ANN401
    """The outputs, best first, stop tokens included, and their scores."""
    prompt = question.prompt
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=question.params.width,
        num_return_sequences=question.n,
        length_penalty=question.params.length_penalty,
        early_stopping=_EARLY_STOPPING[question.params.early_stopping],
        do_sample=False,
        max_new_tokens=question.max_tokens,
        min_new_tokens=question.min_tokens,
        eos_token_id=sorted(question.stop_token_ids) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        # By itself it takes a beam search of width 1 for greedy search.
        custom_generate=type(reference)._beam_search,
    )
    # The padding after a sequence looks like a token; only the beam indices tell them apart.
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    token_ids = [
        row[len(prompt) : len(prompt) + length].tolist()
        for row, length in zip(output.sequences, lengths, strict=True)
    ]
    return token_ids, output.sequences_scores.tolist()


MAX_MODEL_LEN = 512


class ModelPair:
    """`served` is ours, `reference` is the other; both have the float32 weights in `directory`."""

    def __init__(
        self, architecture: str, directory: Path, *, seed: int = 3, **overrides: object
    ) -> None:
        sizes: Mapping[str, Any] = {"max_position_embeddings": MAX_MODEL_LEN, **overrides}
        make_tiny_model(architecture, directory, seed=seed, overrides=sizes)
        self.directory = directory
        self.served: LoadedModel = load_model(ModelConfig(str(directory)))
        self.reference = load_reference(directory)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def prompts(self, lens: Sequence[int], seed: int = 5) -> list[list[int]]:
        """Random prompts; the same arguments give the same."""
        generator = torch.Generator().manual_seed(seed)
        vocab_size = self.served.vocab_size
        return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lens]

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens of `generate` after `prompt`, without a stop."""
        key = tuple(prompt)
        known = self._answers.get(key, [])
        if len(known) < num_tokens:
            known = generate_greedily(self.reference, list(prompt), num_tokens)
            self._answers[key] = known
        return known[:num_tokens]

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """The logprob of each token of `output` after `prompt`."""
        tokens = [*prompt, *output]
        logits = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        chosen = torch.arange(len(prompt) - 1, len(tokens) - 1)
        scored: list[float] = logits.log_softmax(-1)[chosen, list(output)].tolist()
        return scored


def model_pairs(directory_of: Callable[[str], Path]) -> Callable[..., ModelPair]:
    """Makes the pair of an architecture when it is first asked for."""
    made: dict[tuple[object, ...], ModelPair] = {}

    def get(architecture: str, **options: Any) -> ModelPair:  # noqa: ANN401
        key = (architecture, *sorted(options.items()))
        if key not in made:
            made[key] = ModelPair(architecture, directory_of(architecture), **options)
        return made[key]

    return get


@torch.inference_mode()
def served_logits(
    loaded: LoadedModel,
    make_model: MakeModel,
    tokens: Sequence[int],
    block_size: int,
    ends: Sequence[int] = (),
) -> Tensor:
    """Logits [len(tokens), V] on pools of their own, in chunks that end at `ends`, on the CPU."""
    size = len(tokens)
    table = list(reversed(range(-(-size // block_size))))
    pools = (loaded.layers, block_size, len(table), 0, loaded.kv_dtype, loaded.device)
    model = make_model(loaded, KVCache(*pools, scales=loaded.kv_scales))
    params, parts = ExecutorParams(num_prompt_logprobs=0), []
    for start, end in itertools.pairwise((0, *ends, size)):
        row = Row(tokens[start:end], start, table, size + 1, False, params)
        batch = build_input_batch(make_step([row]), [0], block_size, loaded.device)
        parts.append(model.logits(batch).clone())
    return torch.cat(parts).cpu()


_EXECUTOR_EPOCH = 11
_US_PER_TOKEN = 1000


class ObservedScheduler(EngineWithQueue):
    """`num_swapped_out`: requests, not blocks. `max_blocks_in_use`: most at the end of a step."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.plans: list[StepPlan] = []
        self.num_swapped_out = 0
        self.max_blocks_in_use = 0
        self.num_evictions = 0
        self._num_device_blocks = config.num_device_blocks
        self._in_host_pool: set[Request] = set()
        self._device = self.placement.blocks.device
        self._allocate = self._device.allocate
        self._device.allocate = self._count_evictions  # type: ignore[method-assign]

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        in_host_pool = set(self.placement.swapped)
        self.num_swapped_out += len(in_host_pool - self._in_host_pool)
        self._in_host_pool = in_host_pool
        in_use = self._num_device_blocks - self.num_free_blocks
        self.max_blocks_in_use = max(self.max_blocks_in_use, in_use)
        if plan is not None:
            self.plans.append(plan)
        return plan

    @property
    def num_recomputed(self) -> int:
        """Preempted requests that were not swapped out."""
        return self.num_preemptions - self.num_swapped_out

    @property
    def num_computed_tokens(self) -> int:
        """Input tokens of all steps."""
        return sum(plan.num_tokens for plan in self.plans)

    @property
    def num_blocks_out(self) -> int:
        """Blocks copied to the host pool."""
        return sum(len(plan.moves.swap_out) for plan in self.plans)

    @property
    def num_blocks_in(self) -> int:
        """Blocks copied from the host pool."""
        return sum(len(plan.moves.swap_in) for plan in self.plans)

    @property
    def num_blocks_copied(self) -> int:
        """Blocks copied within the device pool."""
        return sum(len(plan.moves.copy) for plan in self.plans)

    def _count_evictions(self, count: int) -> list[int]:
        """Blocks that can be found no more because they were given out."""
        num_published = self._device.num_published
        blocks = self._allocate(count)
        self.num_evictions += num_published - self._device.num_published
        return blocks


class ObservedEngine(InProcessEngine):
    """A tiny model behind an observed core; every step has to succeed.

    `us_per_block`: the core is told that a move takes this long, and a token 1000 us; without it,
    what they really take. `compute`: what runs the model, instead of plain torch. `options` are
    those of SchedulerConfig that matter to the test.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        depth: int = 2,
        preempt_at: Iterable[int] = (),
        us_per_block: float | None = None,
        compute: Compute | None = None,
        grammars: RowGrammars | None = None,
        **options: object,
    ) -> None:
        self._us_per_block = us_per_block
        values: dict[str, object] = {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_waiting": 64,
            "vocab_size": pair.served.vocab_size,
            "eos_token_ids": frozenset(),
            "num_host_blocks": 0,
            "sliding_window": pair.served.sliding_window,
        }
        values |= options
        pools = CacheConfig(
            block_size=_int(values["block_size"]),
            num_device_blocks=_int(values["num_device_blocks"]),
            num_host_blocks=_int(values["num_host_blocks"]),
        )
        if compute is None:
            runner = build_runner(pair.served, pools)
        else:
            runner = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
        self.runner = runner
        values["block_bytes"] = runner.cache.block_bytes
        config = SchedulerConfig(**values)  # type: ignore[arg-type]
        super().__init__(
            config,
            runner,
            epoch=_EXECUTOR_EPOCH,
            depth=depth,
            preempt_at=frozenset(preempt_at),
            grammars=grammars,
        )
        self.core = self.scheduler = ObservedScheduler(config)

    def answer(self, alter: Callable[[pb.StepResult], None] | None = None) -> StepEvents:
        assert alter is None
        return super().answer(self._check)

    def _check(self, result: pb.StepResult) -> None:
        assert result.status == pb.STEP_STATUS_OK, result
        assert not result.row_errors, result
        if self._us_per_block is None:
            return
        plan = self.core.plans[result.step_id - 1]
        result.timings.move_us = round(len(plan.moves) * self._us_per_block)
        result.timings.forward_us = plan.num_tokens * _US_PER_TOKEN
        result.timings.sample_us = 0

    def serve(self, *requests: Request) -> list[list[list[int]]]:
        """Runs `requests`, which leave no block behind; returns the tokens of each sequence."""
        for request in requests:
            self.add(request)
        self.run()
        assert all(request.error is None for request in requests), [r.error for r in requests]
        assert self.scheduler.num_free_blocks == self.core.placement.blocks.device.num_blocks
        return [self.delivered[request.request_id] for request in requests]


def make_request(
    index: int, prompt: list[int], *, seed: int = 0, adapter: str = "", **params: object
) -> Request:
    """The request named `index`, which is its arrival too; greedy unless `params` say otherwise."""
    values = {"temperature": 0.0} | params
    sampling = SamplingParams(**values)  # type: ignore[arg-type]
    scheduling = SchedulingParams(adapter=adapter)
    return Request.create(
        str(index), prompt, sampling, arrival=index, seed=seed, scheduling=scheduling
    )


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
