"""What the number formats of weights change in what a model says.

The matrices of a model's layers are rounded to each format and written as a checkpoint of it, which
is loaded as a user's would be and scores a text in float32. Embedding and output matrix stay as
they are, except where `--quantization` rounds the latter too. `bits_per_weight`: of the rounded
matrices, with scales. `perplexity`: of the text; `perplexity_ratio`: to that of the model with
float32 weights. `kl_divergence`: mean over the positions, in nats, from the float32 distribution.
`same_top_ratio`: how often the most probable token is that of float32.

Rounding is to the nearest code of each group: methods that choose codes by their effect on outputs
(GPTQ, AWQ) are more accurate in the same format.

`--dither`: for a model whose own weights are rounded to 16 values in each group of 32. Codes of one
format can hold those of another by chance, exactly or with errors that do not cancel. Noise of one
rounding step, added to float32 weights first, makes them as weights that were never rounded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from benchmarks.report import emit
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.engine_loader import BUNDLED_DIRECTORY
from executor_service.steps import read_tokenizer_file
from executor_service.trials import rounded_matrices
from tests.support.models.gguf_writer import write_gguf
from tests.support.models.quantised_layers import (
    Layer,
    awq_layer,
    compressed_tensors_layer,
    float8_layer,
    fp4_layer,
    gptq_layer,
    int8_layer,
    nf4_layer,
)

_TEXT = Path("docs/operations.md")
_FLOAT32_SCALE_BITS = 32
# A causal language model of transformers.
Model = Any
Settings = dict[str, str | float]


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store and compute the matrices.

    `write`: writes a model into a folder, and returns the path of the checkpoint and the bits per
    weight. `group_size`: must divide the inputs of each matrix. `computing`: context in which its
    loaded model computes. `rounding`: of the weights at load, see `ModelConfig`.
    """

    write: Callable[[Model, Path], tuple[Path, float]]
    group_size: int = 1
    computing: Callable[[Model], AbstractContextManager[None]] = nullcontext
    rounding: str | None = None


def is_rounded(name: str) -> bool:
    """Returns whether a tensor of the model is a matrix that formats round."""
    return name.endswith("proj.weight")


# -- Writing ---------------------------------------------------------------------------------------


def write_layers(
    declared: Mapping[str, Any], quantise: Callable[[Tensor], Layer], model: Model, folder: Path
) -> tuple[Path, float]:
    """Writes a checkpoint whose configuration declares `quantization_config`, if not empty."""
    tensors: dict[str, Tensor] = {}
    num_bytes = num_weights = 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not is_rounded(name):
            tensors[name] = tensor.contiguous()
            continue
        parts, _ = quantise(tensor)
        num_weights += tensor.numel()
        num_bytes += sum(part.nbytes for part in parts.values())
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": found.contiguous() for part, found in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if declared:
        config["quantization_config"] = dict(declared)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, 8 * num_bytes / num_weights


def write_blocks(type_name: str, model: Model, folder: Path) -> tuple[Path, float]:
    """Writes a GGUF file. Raises NotImplementedError for a type that `gguf` cannot round to."""
    path = folder / f"{type_name}.gguf"
    config = model.config
    plain = {"token_embd.weight": model.get_input_embeddings().weight.data}
    if not config.tie_word_embeddings:
        plain["output.weight"] = model.get_output_embeddings().weight.data
    settings = {f"{config.model_type}.rope.freq_base": float(config.rope_parameters["rope_theta"])}
    write_gguf(
        path,
        model,
        config.model_type,
        settings,
        type_name=type_name,
        extra=plain,
        left_out=tuple(plain),
    )
    block_size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return path, 8 * num_bytes / block_size


def plain(dtype: torch.dtype) -> Format:
    """Weights in a float format."""
    return Format(partial(write_layers, {}, lambda weight: ({"weight": weight.to(dtype)}, weight)))


def compressed(weight_format: str, **settings: str | float) -> Format:
    """A scheme of compressed-tensors."""
    weights = {"type": "int", "symmetric": True, "dynamic": False, **settings}
    declared = {
        "quant_method": "compressed-tensors",
        "format": weight_format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }

    def quantise(weight: Tensor) -> Layer:
        # Scales have the dtype of the weights; in those of 4-bit floats they have their own.
        given = weight if "fp4" in weight_format else weight.bfloat16()
        return compressed_tensors_layer(given, weight_format, settings)

    group_size = int(settings.get("group_size", 1))
    return Format(partial(write_layers, declared, quantise), group_size)


def gptq(num_bits: int, group_size: int) -> Format:
    """The layout of GPTQ, inputs in order."""
    declared = {"quant_method": "gptq", "bits": num_bits, "group_size": group_size}

    def quantise(weight: Tensor) -> Layer:
        return gptq_layer(weight, num_bits, np.arange(weight.shape[1]) // group_size)

    return Format(partial(write_layers, {**declared, "desc_act": False}, quantise), group_size)


def awq(group_size: int) -> Format:
    """The layout of AWQ."""
    declared = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return Format(
        partial(write_layers, declared, partial(awq_layer, group_size=group_size)), group_size
    )


def bitsandbytes(quantise: Callable[[Tensor], Layer], **settings: bool) -> Format:
    """A type of bitsandbytes."""
    return Format(partial(write_layers, {"quant_method": "bitsandbytes", **settings}, quantise))


def write_for_output_scales(model: Model, folder: Path) -> tuple[Path, float]:
    """Writes float32 weights, which `--quantization` rounds to 8 bits, with a scale per output."""
    path, _ = plain(torch.float32).write(model, folder)
    shapes = [tensor.shape for name, tensor in model.state_dict().items() if is_rounded(name)]
    num_weights = sum(shape.numel() for shape in shapes)
    return path, 8 + _FLOAT32_SCALE_BITS * sum(shape[0] for shape in shapes) / num_weights


def write_int4(model: Model, folder: Path) -> tuple[Path, float]:
    """Writes float32 weights, which `--quantization int4` rounds with float16 scales and minima."""
    path, _ = plain(torch.float32).write(model, folder)
    return path, 4 + 2 * 16 / 32


_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_GROUPS_OF_32: Settings = {"num_bits": 4, "strategy": "group", "group_size": 32}
_GROUPS_OF_64: Settings = {"num_bits": 4, "strategy": "group", "group_size": 64}
_GROUPS_OF_128: Settings = {"num_bits": 4, "strategy": "group", "group_size": 128}
_FLOAT8: Settings = {"num_bits": 8, "type": "float"}

FORMATS: dict[str, Format] = {
    "bfloat16": plain(torch.bfloat16),
    "--quantization int8": Format(write_for_output_scales, computing=rounded_matrices),
    "--quantization fp8": Format(write_for_output_scales, group_size=32, rounding="fp8"),
    "--quantization int4": Format(write_int4, group_size=32, rounding="int4"),
    "W8A16, channels": compressed("pack-quantized", num_bits=8, strategy="channel"),
    "W8A16, groups of 32": compressed("pack-quantized", **{**_GROUPS_OF_32, "num_bits": 8}),
    "W4A16, groups of 128": compressed("pack-quantized", **_GROUPS_OF_128),
    "W4A16, groups of 64": compressed("pack-quantized", **_GROUPS_OF_64),
    "W4A16, groups of 32": compressed("pack-quantized", **_GROUPS_OF_32),
    "W4A16, groups of 64, zero points": compressed(
        "pack-quantized", **_GROUPS_OF_64, symmetric=False
    ),
    "W4A16, groups of 32, zero points": compressed(
        "pack-quantized", **_GROUPS_OF_32, symmetric=False
    ),
    "GPTQ, 8 bits, groups of 64": gptq(8, 64),
    "GPTQ, 4 bits, groups of 64": gptq(4, 64),
    "GPTQ, 4 bits, groups of 32": gptq(4, 32),
    "AWQ, groups of 64": awq(64),
    "AWQ, groups of 32": awq(32),
    "FP8, tensor": compressed("float-quantized", **_FLOAT8, strategy="tensor"),
    "FP8, channels": compressed("float-quantized", **_FLOAT8, strategy="channel"),
    "FP8, blocks of 128 x 128": Format(partial(write_layers, _FP8_BLOCKS, float8_layer)),
    "NVFP4": compressed(
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype="torch.float8_e4m3fn",
    ),
    "MXFP4": compressed(
        "mxfp4-pack-quantized", **_GROUPS_OF_32, type="float", scale_dtype="torch.uint8"
    ),
    "bitsandbytes int8": bitsandbytes(int8_layer, load_in_8bit=True),
    "bitsandbytes nf4": bitsandbytes(nf4_layer, load_in_4bit=True),
    "bitsandbytes fp4": bitsandbytes(fp4_layer, load_in_4bit=True),
    # `gguf` cannot round to Q2_K ... Q6_K and IQ4, which need rows of a multiple of 256 weights.
    **{
        f"GGUF {name}": Format(partial(write_blocks, name), group_size=32)
        for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
    },
}


# -- Weights ---------------------------------------------------------------------------------------


def dither(model: Model) -> None:
    """Adds uniform noise to the matrices, in place, as wide as the step of 4 bits per group."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if is_rounded(name):
            groups = tensor.unflatten(1, (-1, 32))
            steps = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
            groups += (torch.rand(groups.shape, generator=generator) - 0.5) * steps


# -- Scoring ---------------------------------------------------------------------------------------


@torch.inference_mode()
def score(model: Model, windows: Sequence[Tensor]) -> list[Tensor]:
    """Returns the log-probabilities of the token after each of a window, [tokens, vocabulary]."""
    model.set_attn_implementation("eager")
    return [
        functional.log_softmax(model(input_ids=window[None], use_cache=False).logits[0], dim=-1)
        for window in windows
    ]


def perplexity(scores: Sequence[Tensor], windows: Sequence[Tensor]) -> float:
    """Returns the perplexity of the tokens after the first of each window."""
    logprobs = [
        each[:-1].gather(1, window[1:, None]) for each, window in zip(scores, windows, strict=True)
    ]
    return math.exp(-torch.cat(logprobs).mean().item())


def distance(reference: Sequence[Tensor], scores: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the mean divergence, and how often the most probable token is the same."""
    divergences, same = [], []
    for expected, found in zip(reference, scores, strict=True):
        divergences.append((expected.exp() * (expected - found)).sum(-1))
        same.append((expected.argmax(-1) == found.argmax(-1)).float())
    return torch.cat(divergences).mean().item(), torch.cat(same).mean().item()


def main() -> None:
    """Scores the text with each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default=str(BUNDLED_DIRECTORY), help="a checkpoint, or a GGUF file"
    )
    parser.add_argument("--text", type=Path, default=_TEXT)
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, from its start")
    parser.add_argument("--window", type=int, default=512, help="tokens that see each other")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dither", action="store_true", help="add noise to the weights first")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(ModelConfig(arguments.model, dtype="float32"))
    if arguments.dither:
        dither(loaded.model)
    tokenizer = Tokenizer.from_buffer(read_tokenizer_file(loaded.tokenizer_files["tokenizer.json"]))
    text = arguments.text.read_text(encoding="utf-8")
    token_ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    windows = torch.split(token_ids[: arguments.tokens], arguments.window)
    reference = score(loaded.model, windows)
    base = perplexity(reference, windows)
    emit("quantised_formats", format="float32", bits_per_weight=32, perplexity=round(base, 4))
    for name in arguments.formats:
        sizes = {t.shape[1] for n, t in loaded.model.state_dict().items() if is_rounded(n)}
        if any(size % FORMATS[name].group_size for size in sizes):
            emit("quantised_formats", format=name, left_out=f"matrices have {sorted(sizes)} inputs")
            continue
        with tempfile.TemporaryDirectory() as folder:
            path, num_bits = FORMATS[name].write(loaded.model, Path(folder))
            config = ModelConfig(str(path), dtype="float32", rounding=FORMATS[name].rounding)
            model = load_model(config).model
            with FORMATS[name].computing(model):
                scores = score(model, windows)
            del model
        found = perplexity(scores, windows)
        divergence, same_top_ratio = distance(reference, scores)
        emit(
            "quantised_formats",
            format=name,
            bits_per_weight=round(num_bits, 2),
            perplexity=round(found, 4),
            perplexity_ratio=round(found / base, 4),
            kl_divergence=round(divergence, 5),
            same_top_ratio=round(same_top_ratio, 4),
            num_tokens=sum(len(window) - 1 for window in windows),
        )


if __name__ == "__main__":
    main()
