"""An EAGLE-3 head in plain torch, as it is trained and saved. Names of parts are the format's.

Source: Li 2025, "EAGLE-3" (arXiv 2503.01840). Shape letters: Q sequences, L tokens of each, W width
of the head, M of the model, H query heads, G key/value heads, D head size, V tokens of the model, U
tokens that the head can guess, N depth.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor, nn

NUM_STATES = 3


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a head, and how the sines of its positions are made."""

    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_width: int
    vocab_size: int
    epsilon: float = 1e-5
    rope_theta: float = 10_000.0


class _Attention(nn.Module):
    """Queries, keys and values of embeddings beside states."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        query, key = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
        self.q_proj = nn.Linear(2 * shape.width, query, bias=False)
        self.k_proj = nn.Linear(2 * shape.width, key, bias=False)
        self.v_proj = nn.Linear(2 * shape.width, key, bias=False)
        self.o_proj = nn.Linear(query, shape.width, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[.., W] -> [.., W]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return output


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, shape.epsilon)
        self.hidden_norm = nn.RMSNorm(shape.width, shape.epsilon)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, shape.epsilon)
        self.mlp = _Mlp(shape)


class Eagle3Head(nn.Module):
    """Guesses tokens from the model's states at the position before, and then from its own."""

    def __init__(self, shape: HeadShape, token_ids: Tensor) -> None:
        """`token_ids`: [U] int64, rising: the tokens of the model that it can guess."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(NUM_STATES * shape.target_width, shape.width, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(shape.width, shape.epsilon)
        self.lm_head = nn.Linear(shape.width, len(token_ids), bias=False)
        self.register_buffer("d2t", token_ids - torch.arange(len(token_ids)))
        can_be_guessed = torch.zeros(shape.vocab_size, dtype=torch.bool)
        can_be_guessed[token_ids] = True
        self.register_buffer("t2d", can_be_guessed)

    @property
    def token_ids(self) -> Tensor:
        """[U] int64."""
        offsets: Tensor = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets))

    def forward(
        self, states: Tensor, embedded: Tensor, depth: int = 1, start: int = 0
    ) -> list[Tensor]:
        """Logits [Q, L, U] of each guess, one after the other, from everywhere in a text.

        `states`: [Q, L, 3 M], the model's at each position. `embedded`: [Q, L, W], of the tokens
        behind these. Guess n at position p goes on from states of its own since p - n + 1; what is
        before it has seen the model's. `start`: the position of the first token.
        """
        own = self.fc(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for _ in range(depth):
            own = self._guess_on(own, embedded, keys, values, start)
            logits.append(self.lm_head(self.norm(own)))
            # At the next position it is what was guessed at this one.
            own = F.pad(own, (0, 0, 1, 0))[:, :-1]
        return logits

    def _guess_on(
        self, own: Tensor, embedded: Tensor, keys: list[Tensor], values: list[Tensor], start: int
    ) -> Tensor:
        """States [Q, L, W] of the guess that follows those of `own`; adds its `keys`, `values`."""
        layer = self.midlayer
        inputs = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(own)], dim=-1)
        query, key, value = (
            project(inputs).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for project in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        groups = self.shape.num_heads // self.shape.num_kv_heads
        keys.append(self._rotated(key, start).repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        attended = _attend(self._rotated(query, start), keys, values)
        own = own + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        output: Tensor = own + layer.mlp(layer.post_attention_layernorm(own))
        return output

    def _rotated(self, heads: Tensor, start: int) -> Tensor:
        """`heads`: [Q, .., L, D]."""
        size = self.shape.head_dim
        speeds = self.shape.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        positions = torch.arange(start, start + heads.shape[-2], dtype=torch.float64)
        angles = torch.outer(positions, speeds)
        cosines, sines = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads[..., : size // 2], heads[..., size // 2 :]
        return torch.cat(
            [first * cosines - second * sines, second * cosines + first * sines], dim=-1
        )


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[Q, H, L, D] of `query`; `keys`, `values`: of each depth, the last is that of `query`.

    What stands n positions before is of depth N - n, the model's own states if that is below 1.
    """
    num_tokens, size = query.shape[-2:]
    depth = len(keys) - 1
    places = torch.arange(num_tokens)
    scores = query @ keys[0].transpose(-1, -2)
    is_behind = places[None, :] > places[:, None] - depth
    scores = scores.masked_fill(is_behind, -torch.inf)
    columns = [scores]
    for level in range(1, depth + 1):
        shifted = _later(keys[level], depth - level)
        of_level = (query * shifted).sum(-1, keepdim=True)
        is_missing = places[:, None] < depth - level
        columns.append(of_level.masked_fill(is_missing, -torch.inf))
    weights = (torch.cat(columns, dim=-1) * size**-0.5).softmax(-1)
    output: Tensor = weights[..., :num_tokens] @ values[0]
    for level in range(1, depth + 1):
        weight = weights[..., num_tokens + level - 1, None]
        output = output + weight * _later(values[level], depth - level)
    return output


def _later(heads: Tensor, count: int) -> Tensor:
    """`heads` [Q, H, L, D], each moved `count` positions on."""
    later: Tensor = F.pad(heads, (0, 0, count, 0))[..., : heads.shape[-2], :]
    return later


def save_head(head: Eagle3Head, directory: Path, layer_ids: list[int], num_positions: int) -> None:
    """Write config and weights, these as they are. `layer_ids`: whose inputs `head` was given."""
    shape = head.shape
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "target_hidden_size": shape.target_width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": num_positions,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": head.lm_head.out_features,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
