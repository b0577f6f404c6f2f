"""What LoRA adapters cost: tokens/s with and without them, and first tokens while slots change.

A random model of the Llama kind and its adapters are made first. `adapters_rate`: greedy rows
without adapters, with one, and spread over several, in turns in the same services. `adapters_many`:
requests that name a few of many registered adapters at random, of which few fit in the executor.
`adapters_step`: a step of the scheduler alone, whose rows have many adapters or none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import emit, percentile
from benchmarks.scheduler import ScheduledLoad
from benchmarks.serving import serving, wait_until_connected
from splitserve_client import (
    AsyncClient,
    Finish,
    SamplingParams,
    SchedulingParams,
    Session,
    SplitserveError,
    Tokens,
)
from splitserve_common import claim_address

_VOCAB_SIZE = 4096
_HEAD_DIM = 64
_PROMPT_TOKENS = 32
_LOADS = "splitserve_adapter_loads_total"
# Different weights of many adapters. Others are links to them, with another factor.
_NUM_WEIGHTS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model, which has two query heads for each key head."""

    hidden_size: int
    num_layers: int

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of each layer."""
        hidden, inner = self.hidden_size, 3 * self.hidden_size
        return {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (hidden, hidden // 2)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (hidden, inner)),
            "mlp.down_proj": (inner, hidden),
        }


def make_model(directory: Path, sizes: Sizes) -> None:
    """Saves a random model of the Llama kind in bfloat16, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    untyped: Any = logging
    untyped.disable_progress_bar()
    torch.manual_seed(0)
    num_heads = sizes.hidden_size // _HEAD_DIM
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=sizes.hidden_size,
        intermediate_size=3 * sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=_HEAD_DIM,
        max_position_embeddings=4096,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def make_adapters(directory: Path, count: int, sizes: Sizes, rank: int) -> list[str]:
    """Saves adapters as PEFT does, each in a folder of its own; returns their names."""
    generator = torch.Generator().manual_seed(0)
    names = [f"adapter-{number:04}" for number in range(count)]
    for number, name in enumerate(names):
        folder = directory / name
        folder.mkdir(parents=True)
        weights = folder / "adapter_model.safetensors"
        if number < _NUM_WEIGHTS:
            save_file(_weights(sizes, rank, generator), weights)
        else:
            os.link(directory / names[number % _NUM_WEIGHTS] / weights.name, weights)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "random",
            "r": rank,
            "lora_alpha": rank + number,
            "target_modules": sorted(module.rpartition(".")[2] for module in sizes.modules),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return names


def _weights(sizes: Sizes, rank: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = {}
    for layer in range(sizes.num_layers):
        for module, (num_inputs, num_outputs) in sizes.modules.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            for kind, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                tensor = 0.02 * torch.randn(shape, generator=generator)
                tensors[f"{stem}.lora_{kind}.weight"] = tensor.to(torch.bfloat16)
    return tensors


def prompt_of(number: int) -> list[int]:
    """A random prompt, always the same for a number."""
    rng = random.Random(number)
    return [rng.randrange(3, _VOCAB_SIZE) for _ in range(_PROMPT_TOKENS)]


# -- Rates of rows with and without adapters -------------------------------------------------------


async def rate(address: str, adapters: Sequence[str], num_tokens: int) -> float:
    """Tokens per second of one greedy row for each of `adapters`, all at once."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async with AsyncClient(address) as client, client.session() as session:
        start = time.perf_counter()
        requests = [
            session.submit(
                prompt_of(number),
                params,
                scheduling=SchedulingParams(adapter=adapter, bypass_prefix_cache=True),
            )
            for number, adapter in enumerate(adapters)
        ]
        for request in requests:
            async for event in request:
                assert not isinstance(event, Finish) or event.usage.num_output_tokens == num_tokens
        return len(adapters) * num_tokens / (time.perf_counter() - start)


def measure_rates(model: str, directory: Path, arguments: argparse.Namespace, sizes: Sizes) -> None:
    """Runs the kinds of rows in turns and prints the rate of each, and its ratio to the first."""
    names = make_adapters(directory, arguments.adapters, sizes, arguments.rank)
    rows = range(arguments.rows)
    kinds = {
        "none": ["" for _ in rows],
        "one": [names[0] for _ in rows],
        "several": [names[row % len(names)] for row in rows],
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    flags = [f"--adapter={name}={directory / name}" for name in names]
    slots = ["--max-adapters", str(arguments.adapters)]
    with (
        serving(model, arguments.threads, *slots, scheduler_options=flags) as address,
        asyncio.Runner() as runner,
    ):
        runner.run(wait_until_connected(address))
        # The first requests load the adapters.
        runner.run(rate(address, kinds["several"], 2))
        for _ in range(arguments.runs):
            for kind, adapters in kinds.items():
                rates[kind].append(runner.run(rate(address, adapters, arguments.tokens)))
    for kind, found in rates.items():
        ratios = [each / plain for each, plain in zip(found, rates["none"], strict=True)]
        emit(
            "adapters_rate",
            adapters=len(set(kinds[kind]) - {""}),
            rank=arguments.rank,
            rows=arguments.rows,
            tokens_per_s=round(statistics.median(found), 1),
            ratio=round(statistics.median(ratios), 3),
            runs=arguments.runs,
            threads=arguments.threads,
        )


# -- Many adapters that take turns -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Time to the first token of a request, and its error; empty for none."""

    ttft_s: float
    error: str = ""


async def ask(session: Session, number: int, adapter: str, num_tokens: int) -> Answer:
    """Makes one request."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start, ttft_s = time.perf_counter(), 0.0
    scheduling = SchedulingParams(adapter=adapter)
    try:
        async for event in session.submit(prompt_of(number), params, scheduling=scheduling):
            if isinstance(event, Tokens) and not ttft_s:
                ttft_s = time.perf_counter() - start
    except SplitserveError as error:
        return Answer(ttft_s, str(error))
    return Answer(ttft_s)


async def ask_many(
    address: str, adapters: Sequence[str], num_tokens: int, concurrency: int
) -> list[Answer]:
    """Makes a request with each of `adapters`, so many at a time."""
    answers: list[Answer] = []
    remaining = iter(enumerate(adapters))

    async def work(session: Session) -> None:
        for number, adapter in remaining:
            answers.append(await ask(session, number, adapter, num_tokens))

    async with (
        AsyncClient(address) as client,
        client.session() as session,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(concurrency):
            tasks.create_task(work(session))
    return answers


def num_loads(metrics: str) -> int | None:
    """Adapters that executors have loaded, by the scheduler's metrics; None if these have none."""
    with urllib.request.urlopen(f"http://{metrics}/metrics") as response:
        lines = response.read().decode().splitlines()
    loads = (line for line in lines if line.startswith(_LOADS) and 'outcome="loaded"' in line)
    found = [float(line.rpartition(" ")[2]) for line in loads]
    return int(sum(found)) if found else None


def measure_many(model: str, directory: Path, arguments: argparse.Namespace, sizes: Sizes) -> None:
    """Registers many adapters by their folder, and uses some of them at random."""
    names = make_adapters(directory, arguments.registered, sizes, arguments.rank)
    rng = random.Random(0)
    used = rng.sample(names, arguments.used)
    adapters = rng.choices(used, k=arguments.requests)
    metrics = claim_address("127.0.0.1:0")
    slots = ["--max-adapters", str(arguments.max_adapters)]
    flags = [f"--adapters-dir={directory}", f"--metrics-listen={metrics}"]
    with serving(model, arguments.threads, *slots, scheduler_options=flags) as address:
        asyncio.run(wait_until_connected(address))
        start = time.perf_counter()
        answers = asyncio.run(
            ask_many(address, adapters, arguments.short_tokens, arguments.concurrency)
        )
        elapsed_s = time.perf_counter() - start
        loads = num_loads(metrics)
    ttft_ms = [1e3 * answer.ttft_s for answer in answers if not answer.error]
    emit(
        "adapters_many",
        registered=arguments.registered,
        used=len(set(adapters)),
        max_adapters=arguments.max_adapters,
        requests=len(answers),
        failures=sum(bool(answer.error) for answer in answers),
        first_failure=next((answer.error for answer in answers if answer.error), None),
        ttft_ms_p50=percentile(ttft_ms, 50) if ttft_ms else None,
        ttft_ms_p99=percentile(ttft_ms, 99) if ttft_ms else None,
        requests_per_s=round(len(answers) / elapsed_s, 1),
        loads=loads,
        concurrency=arguments.concurrency,
        threads=arguments.threads,
    )


def measure_step(arguments: argparse.Namespace) -> None:
    """Plans, encodes and applies steps of the same rows with and without adapters, in turns."""
    rows, adapters = arguments.step_rows, arguments.step_adapters
    plain = ScheduledLoad(rows, prefix_caching=True)
    adapted = ScheduledLoad(rows, prefix_caching=True, num_adapters=adapters)
    plain_us, adapted_us = zip(
        *((plain.step(), adapted.step()) for _ in range(arguments.steps)), strict=True
    )
    emit(
        "adapters_step",
        rows=rows,
        adapters=adapters,
        plain_us=round(statistics.median(plain_us), 1),
        adapted_us=round(statistics.median(adapted_us), 1),
        ratio=round(statistics.median(adapted_us) / statistics.median(plain_us), 3),
    )


_PARTS = {"rate": measure_rates, "many": measure_many}
_STEP = "step"


def main() -> None:
    """Makes a model and adapters, and measures both parts, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", default=[*_PARTS, _STEP], choices=[*_PARTS, _STEP])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--used", type=int, default=50)
    parser.add_argument("--max-adapters", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--short-tokens", type=int, default=16, help="of a request of part many")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--step-rows", type=int, default=256)
    parser.add_argument("--step-adapters", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000, help="of part step")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.hidden_size, arguments.layers)
    if _STEP in arguments.parts:
        measure_step(arguments)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_model(model, sizes)
        for part in filter(_PARTS.__contains__, arguments.parts):
            _PARTS[part](str(model), Path(directory) / part, arguments, sizes)


if __name__ == "__main__":
    main()
