"""How large everything is: for a real device, and small enough for a test on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from executor_service.backends.choose import AUTO, TORCH


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A random model. `config_class`: its name in transformers."""

    name: str
    config_class: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """`contexts`: tokens that a decode sees. `prompts`: (computed, new) tokens of a row.

    `heads`: query heads, key/value heads and their size, in the attention benchmarks.
    `copy_bytes`, `pool_bytes`: so much that no cache holds it.
    """

    device: torch.device
    backend: str
    dtype: torch.dtype
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int]
    copy_bytes: int
    pool_bytes: int
    matrix_size: int
    vocab_size: int
    # Divides the lengths of the correctness problems; above 1 they have one group of heads.
    divisor: int
    models: tuple[ModelShape, ...]
    model_context: int
    num_prompt_tokens: int
    # Tokens of a prompt beside decodes.
    chunks: tuple[int, ...]
    num_steps: int
    num_runs: int


_QWEN3_06B = ModelShape(
    "Qwen3 0.6B",
    "Qwen3Config",
    {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
)
_LLAMA_8B = ModelShape(
    "Llama 8B",
    "LlamaConfig",
    {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
)
_TINY: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
}


def full_sizes() -> Sizes:
    """For the GPU of this machine."""
    return Sizes(
        device=torch.device("cuda", torch.cuda.current_device()),
        backend=AUTO,
        dtype=torch.bfloat16,
        batches=(1, 32, 256),
        contexts=(512, 1024, 2048, 4096, 8192),
        prompts=((0, 2048), (0, 8192), (6144, 2048)),
        heads=(32, 8, 128),
        copy_bytes=2**31,
        pool_bytes=2**28,
        matrix_size=8192,
        vocab_size=151936,
        divisor=1,
        models=(_QWEN3_06B, _LLAMA_8B),
        model_context=512,
        num_prompt_tokens=2048,
        chunks=(8, 64, 500, 1536),
        num_steps=32,
        num_runs=10,
    )


def smoke_sizes() -> Sizes:
    """For a test on the CPU, with kernels interpreted: that every part runs."""
    return Sizes(
        device=torch.device("cpu"),
        backend=TORCH,
        dtype=torch.float32,
        batches=(1, 2),
        contexts=(20,),
        prompts=((5, 9),),
        heads=(2, 1, 16),
        copy_bytes=2**16,
        pool_bytes=2**12,
        matrix_size=32,
        vocab_size=500,
        divisor=64,
        models=(
            ModelShape("tiny Qwen3", "Qwen3Config", _TINY),
            ModelShape("tiny Llama", "LlamaConfig", _TINY),
        ),
        model_context=8,
        num_prompt_tokens=16,
        chunks=(5,),
        num_steps=1,
        num_runs=1,
    )
