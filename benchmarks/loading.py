"""Time to load a checkpoint, beside the time to read its files.

The checkpoint is made first, of random weights: shards in bfloat16, a large vocabulary, tied
embeddings. Cold: the system was asked to forget the files before, which it may decline. Warm: they
were read just before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import emit
from executor_service.backends import AUTO, Compute, choose_compute
from executor_service.checkpoint import (
    Checkpoint,
    ModelConfig,
    load_model,
    read_model,
    resolve_checkpoint,
)
from executor_service.model import LoadedModel

_BUFFER_BYTES = 16 * 2**20
_PAGE_BYTES = 4096
_BLOCK_SIZE = 16


def make_checkpoint(directory: Path, num_layers: int) -> Checkpoint:
    """Saves a random model of the Llama kind; 28 layers make 1.2 GB."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    untyped: Any = logging
    untyped.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size="400MB")
    return resolve_checkpoint(str(directory))


def evict(checkpoint: Checkpoint) -> None:
    """Asks the system to forget the files."""
    with suppress(AttributeError):
        for path in checkpoint.weight_files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def scan_files(checkpoint: Checkpoint) -> None:
    """Reads the files through one small buffer: the least that reading can cost."""
    buffer = bytearray(_BUFFER_BYTES)
    for path in checkpoint.weight_files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_files(checkpoint: Checkpoint) -> list[bytes]:
    """Reads the files into memory."""
    return [path.read_bytes() for path in checkpoint.weight_files]


def read_weights(checkpoint: Checkpoint) -> None:
    """The model with its weights, each page of which has been touched."""
    from transformers import AutoConfig

    directory = checkpoint.directory
    config = AutoConfig.from_pretrained(directory)
    model = read_model(checkpoint, config, ModelConfig(str(directory)))
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8)[::_PAGE_BYTES].max()


def load(checkpoint: Checkpoint) -> LoadedModel:
    """The model, tried."""
    return load_model(ModelConfig(str(checkpoint.directory)))


def load_to_compute(checkpoint: Checkpoint) -> Compute:
    """The model as it will run: on a CPU with its weights packed, and tried again."""
    return choose_compute(lambda: load(checkpoint), AUTO, _BLOCK_SIZE)


def measure(checkpoint: Checkpoint, run: Callable[[Checkpoint], object]) -> tuple[float, float]:
    """Seconds of `run`, cold and warm."""
    seconds = []
    for prepare in (evict, scan_files):
        prepare(checkpoint)
        started_s = time.perf_counter()
        run(checkpoint)
        seconds.append(time.perf_counter() - started_s)
    return seconds[0], seconds[1]


def main() -> None:
    """Prints, for each stage of loading, the median of its runs and its ratio to `read_files`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args()
    stages = (scan_files, read_files, read_weights, load, load_to_compute)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory), options.layers)
        read_weights(checkpoint)  # imports what is imported late
        num_bytes = sum(path.stat().st_size for path in checkpoint.weight_files)
        # Side by side, so that what else the machine does meets all of them.
        rounds = [
            {run.__name__: measure(checkpoint, run) for run in stages} for _ in range(options.runs)
        ]
    for index, cache in enumerate(("cold", "warm")):
        medians = {
            run.__name__: statistics.median(times[run.__name__][index] for times in rounds)
            for run in stages
        }
        for stage, seconds in medians.items():
            emit(
                "loading",
                stage=stage,
                cache=cache,
                seconds=round(seconds, 2),
                ratio=round(seconds / medians["read_files"], 2),
                gigabytes=round(num_bytes / 1e9, 2),
                runs=options.runs,
            )


if __name__ == "__main__":
    main()
