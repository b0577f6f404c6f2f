"""A decoder that says what its prompt says: each next token is the one `distance` tokens back.

A Llama of one layer whose weights are computed, not trained. A hidden state has a constant, a code
of its own token, and a code of the copied token: [c, own (64), copied (64)]. Queries and keys are
made of the constant alone, so rotary positions make each token attend to the one at the distance.
Its code is the value, and the output head looks the copied code up.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CODE_SIZE = 64
_CONSTANT = 8.0
# Large enough that attention looks at one token, and that sampling takes the code's own token.
_QUERY_SCALE = 2000.0
_LOGIT_SCALE = 4.0


def make_copying_model(
    directory: Path, *, vocab_size: int, distance: int, eos_token_id: int, num_positions: int = 4096
) -> Path:
    """Saves the model in `directory`, which is returned. There is no tokenizer.

    The next token equals the one `distance` tokens before it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=2 * _CODE_SIZE + 64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=_CODE_SIZE,
        max_position_embeddings=num_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
    model: Any = LlamaForCausalLM(config)
    codes = torch.randint(2, (vocab_size, _CODE_SIZE), generator=torch.Generator().manual_seed(0))
    codes = 2.0 * codes - 1
    own, copied = slice(64, 64 + _CODE_SIZE), slice(64 + _CODE_SIZE, 64 + 2 * _CODE_SIZE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1 if parameter.dim() == 1 else 0)
        layer = model.model.layers[0].self_attn
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        model.model.embed_tokens.weight[:, own] = codes
        layer.q_proj.weight[:, 0] = _QUERY_SCALE * _rotated_back(distance - 1)
        layer.k_proj.weight[:, 0] = _rotated_back(0)
        layer.v_proj.weight[:, own] = torch.eye(_CODE_SIZE)
        layer.o_proj.weight[copied] = torch.eye(_CODE_SIZE)
        model.lm_head.weight[:, copied] = _LOGIT_SCALE * codes
    model.save_pretrained(directory)
    return directory


def _rotated_back(num_positions: int) -> Tensor:
    """Returns the vector that rotary embedding turns to angle 0 after so many positions."""
    half = _CODE_SIZE // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = -num_positions * frequencies
    return torch.cat([torch.cos(angles), torch.sin(angles)]).float() / math.sqrt(half)
