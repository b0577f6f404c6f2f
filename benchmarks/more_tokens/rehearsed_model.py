"""A model of the Llama kind that says texts by heart, as a checkpoint and as a GGUF file.

It computes all that a model of its shape computes; what its layers add to the residual stream does
not change which token comes next, and that is the one whose row of the last matrix is the
embedding of the token before. So every engine says the same text, whatever its arithmetic, and
how much of it was there before is up to the text.

Shape letters: V tokens of the vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of what layers add to embeddings of size 1: all of them together less than half of that. Much less
# would make a model without any noise of its own, which trials of other arithmetic go by.
_LAYER_STD = 0.01
_STD = 0.02
# The largest logit is about that.
_LOGIT = 40.0
_BOS, _EOS = 1, 2
_NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model; by default that of a Llama with 160 million parameters."""

    vocab_size: int = 32_000
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    intermediate_size: int = 2048
    max_positions: int = 4096


def write_rehearsed(folder: Path, following: Mapping[int, int], shape: Shape) -> None:
    """A checkpoint of a model that says `following[t]` after token t, into `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        dtype="bfloat16",
    )
    model: Any = LlamaForCausalLM(config)
    weights = model.to(torch.bfloat16).state_dict()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.normal_(std=_LAYER_STD)
    weights["model.embed_tokens.weight"].normal_()
    weights["lm_head.weight"].copy_(_last_matrix(weights["model.embed_tokens.weight"], following))
    model.save_pretrained(folder)


def _last_matrix(embeddings: Tensor, following: Mapping[int, int]) -> Tensor:
    """[V, H] of [V, H]."""
    matrix = torch.randn_like(embeddings) * _STD
    before, after = torch.tensor(list(following.items())).T
    matrix[after] = embeddings[before] * (_LOGIT / embeddings.shape[1])
    return matrix


def write_gguf(folder: Path, path: Path) -> None:
    """The checkpoint in `folder` as a file that llama.cpp reads; needs the package `gguf`."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_vocabulary(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in _read_weights(folder):
        module = name.split(".")[-2]
        if module in num_heads:
            weight = _interleaved(weight, num_heads[module])
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        if weight.ndim == 1:
            writer.add_tensor(gguf_name, weight)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_weights(folder: Path) -> list[tuple[str, np.ndarray]]:
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    return [(name, weight.float().numpy()) for name, weight in weights.items()]


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp rotates them, pairs side by side."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _add_vocabulary(writer: Any, vocab_size: int) -> None:  # noqa: ANN401
    """Names for the tokens, which nobody reads."""
    import gguf

    kinds = gguf.TokenType
    special = ["<unk>", "<s>", "</s>"]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)]
    others = [f"w{index}" for index in range(vocab_size - len(special) - len(of_bytes))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    types += [kinds.BYTE] * len(of_bytes) + [kinds.NORMAL] * len(others)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *of_bytes, *others])
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types(types)
    writer.add_bos_token_id(_BOS)
    writer.add_eos_token_id(_EOS)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
