"""Encoder-decoders beside `generate` of transformers: output tokens/s, and how fast audio is read.

Random models of BART-base's and Whisper-tiny's shape (with a small vocabulary for Whisper) in
float32. `encoder_decoder_rate`: the same inputs through scheduler and executor, all submitted at
once, and through `generate` at its best batch size, in turns in one run. Every answer is as long as
is asked. Both have the same number of threads.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from benchmarks.report import emit
from benchmarks.serving import serving, wait_until_connected
from splitserve_client import AsyncClient, Finish, SamplingParams, SchedulingParams
from tests.support.models.tiny_whisper import make_tiny_whisper

_BATCH_SIZES = (1, 4, 16)
_WINDOW_S = 30


@dataclass(frozen=True)
class Task:
    """A model with what it reads. `features`: [1, M, F] each, instead of `texts`, for Whisper."""

    name: str
    model: Any
    start: list[int]
    texts: Sequence[list[int]] = ()
    features: Sequence[Tensor] = ()

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return len(self.texts) or len(self.features)

    def inputs(self, index: int) -> dict[str, Any]:
        """Returns the client's options for an input."""
        if self.features:
            return {"encoder_features": self.features[index].numpy().tobytes()}
        return {"encoder_token_ids": self.texts[index]}


def make_bart(directory: Path, num_inputs: int) -> Task:
    """Saves a random model of BART-base's shape, without a tokenizer."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    config = BartConfig(
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        forced_eos_token_id=None,
    )
    model: Any = BartForConditionalGeneration(config).eval()
    model.save_pretrained(directory)
    rng = random.Random(1)
    texts = [
        [rng.randrange(4, 50_000) for _ in range(rng.randrange(32, 256))] for _ in range(num_inputs)
    ]
    return Task("bart", model, [config.decoder_start_token_id], texts=texts)


def make_whisper(directory: Path, num_inputs: int) -> Task:
    """Saves a random model of Whisper-tiny's shape."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    make_tiny_whisper(directory)
    config: Any = WhisperConfig.from_pretrained(directory)
    config.d_model, config.num_mel_bins, config.max_source_positions = 384, 80, 1500
    config.encoder_layers = config.decoder_layers = 4
    config.encoder_attention_heads = config.decoder_attention_heads = 6
    config.encoder_ffn_dim = config.decoder_ffn_dim = 1536
    torch.manual_seed(0)
    model: Any = WhisperForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig.from_pretrained(directory)
    model.save_pretrained(directory)
    make: Any = WhisperFeatureExtractor
    make().save_pretrained(directory)
    features = [
        torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(seed))
        for seed in range(num_inputs)
    ]
    return Task("whisper", model, [config.decoder_start_token_id], features=features)


# -- Rates -----------------------------------------------------------------------------------------


async def served_rate(address: str, task: Task, num_tokens: int) -> float:
    """Output tokens per second through the services."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    # Each run is to encode again.
    scheduling = SchedulingParams(bypass_prefix_cache=True)
    async with AsyncClient(address) as client, client.session() as session:
        start = time.perf_counter()
        requests = [
            session.submit(task.start, params, scheduling=scheduling, **task.inputs(index))
            for index in range(task.num_inputs)
        ]
        num_output_tokens = 0
        for request in requests:
            async for event in request:
                if isinstance(event, Finish):
                    num_output_tokens += event.usage.num_output_tokens
        assert num_output_tokens == num_tokens * task.num_inputs
        return num_output_tokens / (time.perf_counter() - start)


@torch.inference_mode()
def generated_rate(task: Task, num_tokens: int, batch_size: int) -> float:
    """Output tokens per second by `generate`; texts of similar length share a batch."""
    from transformers import GenerationMixin

    generate: Any = GenerationMixin.generate  # not Whisper's own, which handles windows
    order = sorted(range(task.num_inputs), key=lambda i: len(task.texts[i]) if task.texts else 0)
    start = time.perf_counter()
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        generate(
            task.model,
            **_batch(task, batch),
            decoder_input_ids=torch.tensor([task.start] * len(batch)),
            do_sample=False,
            num_beams=1,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
    return num_tokens * task.num_inputs / (time.perf_counter() - start)


def _batch(task: Task, batch: Sequence[int]) -> dict[str, Tensor]:
    """Returns inputs, padded to the longest."""
    if task.features:
        return {"input_features": torch.cat([task.features[index] for index in batch])}
    texts = [torch.tensor(task.texts[index]) for index in batch]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=1)
    return {"input_ids": padded, "attention_mask": (padded != 1).long()}


def measure(task: Task, address: str, arguments: argparse.Namespace) -> None:
    """Compares rates, in turns."""
    num_tokens = arguments.tokens
    with asyncio.Runner() as runner:
        runner.run(wait_until_connected(address))
        runner.run(served_rate(address, task, num_tokens))
        best = max(_BATCH_SIZES, key=lambda size: generated_rate(task, num_tokens, size))
        ours, theirs = [], []
        for _ in range(arguments.runs):
            ours.append(runner.run(served_rate(address, task, num_tokens)))
            theirs.append(generated_rate(task, num_tokens, best))
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    rate = statistics.median(ours)
    audio = {}
    if task.features:
        audio["audio_s_per_s"] = round(rate / num_tokens * _WINDOW_S, 1)
    emit(
        "encoder_decoder_rate",
        model=task.name,
        tokens_per_s=round(rate, 1),
        generate_tokens_per_s=round(statistics.median(theirs), 1),
        batch_size=best,
        ratio=round(statistics.median(ratios), 3),
        **audio,
        inputs=task.num_inputs,
        tokens=num_tokens,
        runs=arguments.runs,
        threads=arguments.threads,
    )


def main() -> None:
    """Makes each model, starts the services for it, and measures both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    makers: tuple[Callable[[Path, int], Task], ...] = (make_bart, make_whisper)
    for make in makers:
        with tempfile.TemporaryDirectory() as directory:
            task = make(Path(directory), arguments.inputs)
            with serving(directory, arguments.threads, "--dtype", "float32") as address:
                measure(task, address, arguments)


if __name__ == "__main__":
    main()
