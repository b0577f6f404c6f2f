"""How large everything is: for a real device, and small enough for a test on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from executor_service.backends import AUTO, TORCH

# (computed, new) tokens of each row.
Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A random model. `config_class`: its name in transformers.

    `is_int4`: matrices are rounded to 4 bits, that of the head to 8.
    """

    name: str
    config_class: str
    options: Mapping[str, Any]
    is_int4: bool = False


# By identity: what was measured of one is kept for it.
@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """`batches`, `model_context`: rows of decodes, and the tokens that each sees.

    `copy_bytes`, `pool_bytes`: so much that no cache holds it. `divisor`: divides the lengths of
    problems; above 1 they have one group of heads. `chunks`: tokens of a prompt beside decodes.
    """

    device: torch.device
    backend: str
    dtype: torch.dtype
    batches: tuple[int, ...]
    heads: tuple[int, int, int]
    copy_bytes: int
    pool_bytes: int
    matrix_size: int
    vocab_size: int
    divisor: int
    small_model: ModelShape
    large_model: ModelShape
    others_model: ModelShape
    model_context: int
    num_prompt_tokens: int
    chunks: tuple[int, ...]
    num_steps: int
    num_runs: int
    stream_tokens: int

    @property
    def is_smoke(self) -> bool:
        """Whether only the way through is tried."""
        return self.divisor > 1

    def rows(self, rows: Rows) -> Rows:
        """`rows`; in a smoke test the first, the last and no long ones."""
        if not self.is_smoke:
            return rows
        few = rows if len(rows) < 3 else (rows[0], rows[-1])
        return tuple((computed % 13, min(new, 5)) for computed, new in few)


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
        "max_position_embeddings": 131072,
    },
)
# Run by transformers' own code, with windows in some layers.
_GEMMA3 = ModelShape(
    "Gemma 3, 6 layers",
    "Gemma3TextConfig",
    {
        "vocab_size": 32000,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
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
    "max_position_embeddings": 256,
}


def full_sizes() -> Sizes:
    """For the GPU of this machine."""
    return Sizes(
        device=torch.device("cuda", torch.cuda.current_device()),
        backend=AUTO,
        dtype=torch.bfloat16,
        batches=(1, 32, 256),
        heads=(32, 8, 128),
        copy_bytes=2**31,
        pool_bytes=2**29,
        matrix_size=8192,
        vocab_size=151936,
        divisor=1,
        small_model=_QWEN3_06B,
        large_model=_LLAMA_8B,
        others_model=_GEMMA3,
        model_context=1024,
        num_prompt_tokens=2048,
        chunks=(8, 64, 500, 1536),
        num_steps=32,
        num_runs=10,
        stream_tokens=128,
    )


def smoke_sizes() -> Sizes:
    """For a test on the CPU: that every part runs."""
    return Sizes(
        device=torch.device("cpu"),
        backend=TORCH,
        dtype=torch.float32,
        batches=(1, 2),
        heads=(2, 1, 16),
        copy_bytes=2**16,
        pool_bytes=2**12,
        matrix_size=32,
        vocab_size=500,
        divisor=64,
        small_model=ModelShape("tiny Qwen3", "Qwen3Config", {**_TINY, "tie_word_embeddings": True}),
        large_model=ModelShape("tiny Llama", "LlamaConfig", _TINY),
        others_model=ModelShape(
            "tiny Gemma 3", "Gemma3TextConfig", {**_TINY, "sliding_window": 16}
        ),
        model_context=8,
        num_prompt_tokens=16,
        chunks=(5,),
        num_steps=1,
        num_runs=1,
        stream_tokens=4,
    )
