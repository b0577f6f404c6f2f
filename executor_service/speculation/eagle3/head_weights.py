"""The weights of an EAGLE-3 head: names and shapes first, then numbers.

Shape letters: W width of the head, M of the model, I of the MLP, H query heads, G key/value heads,
D head size, V tokens of the model, U tokens that the head can guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from executor_service.errors import ModelUnreadable, ModelUnsupported, one_line
from executor_service.speculation.eagle3.head_config import NUM_STATES, HeadConfig

_EMBEDDING, _OFFSETS, _MASK = "embed_tokens.weight", "d2t", "t2d"
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """All in one dtype. `fc`: [W, 3 M]. `query`, `key`, `value`: [.., 2 W].

    `head`: [U, W]. `token_ids`: [U] int64, which tokens these are. `embedding`: [V, W], None for
    that of the model.
    """

    fc: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attention_output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    final_norm: Tensor
    head: Tensor
    token_ids: Tensor
    embedding: Tensor | None


def read_head_weights(files: Sequence[Path], config: HeadConfig, dtype: torch.dtype) -> HeadWeights:
    """`files`: those of the checkpoint.

    Raises ModelUnsupported, before it reads a number, if there are other tensors in them than a
    head of this `config` has, and ModelUnreadable if they are broken.
    """
    directory = files[0].parent
    shapes = _shapes(config)
    try:
        found = {_plain(name): shape for path in files for name, shape in _found(path).items()}
        _check_shapes(directory, shapes, found)
        tensors = {_plain(name): tensor for path in files for name, tensor in _read(path).items()}
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelUnreadable(f"{directory}: {one_line(error)}") from error
    by_name = {name: tensors[full].to(dtype) for name, full in _NAMES.items()}
    embedding = tensors.get(_EMBEDDING)
    if embedding is None and config.width != config.target_width:
        raise ModelUnsupported(
            f"{directory}: {_EMBEDDING} is missing, which a head of another width than its model"
            f" needs: {config.width} and {config.target_width}"
        )
    return HeadWeights(
        **by_name,
        token_ids=_token_ids(directory, tensors.get(_OFFSETS), config),
        embedding=None if embedding is None else embedding.to(dtype),
    )


_NAMES: Mapping[str, str] = {
    "fc": "fc.weight",
    "input_norm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "query": "midlayer.self_attn.q_proj.weight",
    "key": "midlayer.self_attn.k_proj.weight",
    "value": "midlayer.self_attn.v_proj.weight",
    "attention_output": "midlayer.self_attn.o_proj.weight",
    "mlp_norm": "midlayer.post_attention_layernorm.weight",
    "gate": "midlayer.mlp.gate_proj.weight",
    "up": "midlayer.mlp.up_proj.weight",
    "down": "midlayer.mlp.down_proj.weight",
    "final_norm": "norm.weight",
    "head": "lm_head.weight",
}


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Of all tensors that a head may have, by their names in checkpoints."""
    width, mlp = config.width, config.mlp_width
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    norm = (width,)
    of_field = {
        "fc": (width, NUM_STATES * config.target_width),
        "input_norm": norm,
        "hidden_norm": norm,
        "query": (query, 2 * width),
        "key": (key, 2 * width),
        "value": (key, 2 * width),
        "attention_output": (width, query),
        "mlp_norm": norm,
        "gate": (mlp, width),
        "up": (mlp, width),
        "down": (width, mlp),
        "final_norm": norm,
        "head": (config.draft_vocab_size, width),
    }
    return {_NAMES[field]: shape for field, shape in of_field.items()} | {
        _EMBEDDING: (config.vocab_size, width),
        _OFFSETS: (config.draft_vocab_size,),
        _MASK: (config.vocab_size,),
    }


def _check_shapes(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
) -> None:
    missing = [name for name in _NAMES.values() if name not in found]
    unknown = [name for name in found if name not in shapes]
    for what, names in (("missing", missing), ("not known", unknown)):
        if names:
            shown = ", ".join(sorted(names)[:_NUM_NAMED])
            raise ModelUnsupported(
                f"{directory}: {len(names)} tensors of an EAGLE-3 head are {what}: {shown}"
            )
    for name, shape in found.items():
        if shape != shapes[name]:
            raise ModelUnsupported(
                f"{directory}: {name} is {list(shape)}, where config.json says {list(shapes[name])}"
            )


def _found(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a file."""
    if path.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in _read(path).items()}
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{path.name} holds no tensors by their names")
    return tensors


def _plain(name: str) -> str:
    """Some are saved as parts of a whole."""
    return name.removeprefix("model.")


def _token_ids(directory: Path, offsets: Tensor | None, config: HeadConfig) -> Tensor:
    """[U] int64: `offsets` say how far each is from the number that the head has for it."""
    own = torch.arange(config.draft_vocab_size)
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelUnsupported(
                f"{directory}: {_OFFSETS} is missing, and draft_vocab_size"
                f" {config.draft_vocab_size} is not vocab_size {config.vocab_size}"
            )
        return own
    token_ids = own + offsets.to(torch.int64)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= config.vocab_size:
        raise ModelUnsupported(
            f"{directory}: {_OFFSETS} means tokens from {int(token_ids.min())} to"
            f" {int(token_ids.max())}; allowed: 0 to {config.vocab_size - 1}"
        )
    return token_ids
