"""Every type of language model, made small, served in every number format: is it right?

The truth is Hugging Face's forward pass in float32 with the same (rounded) weights, over a prompt
as long as the model allows. `python -m tests.support.models.model_walk` goes through all of them
and prints a table; `model_outcomes.txt` holds what is to come out.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_service.backends import AUTO, Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import BackendUnavailable, ModelUnsupported
from executor_service.trials import relative_error, rounded_matrices
from tests.support.models.model_pair import served_logits
from tests.support.models.tiny_models import auto_class, make_tiny_model

FORMATS = ("float32", "bfloat16", "float16", "int8")
REFUSED, NOT_SMALL = "refused", "not made small"
OUTCOMES = Path(__file__).with_name("model_outcomes.txt")
# More weights than this are no small model.
_MAX_NUM_WEIGHTS = 15_000_000
_MAX_PROMPT_LEN = 96
_BLOCK_SIZE = 8
_CHUNK = 29
# Of float32 logits, see `relative_error`: sums in another order, through peaked layers.
_TOLERANCE = 3e-4
# In 16 bits rounding may make a mixture choose another expert for a token that many attend to. That
# does not happen in most of so many prompts.
_NUM_PROMPTS = 3
# What serving in 16 bits may err more than Hugging Face does in 16 bits.
_NOISE_FACTOR = 2.0


class NotSmall(Exception):
    """A type that no small model is made of."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result for a model type in one number format.

    `kind`: what computes it, REFUSED or NOT_SMALL, with the `reason` for people. `error` is None
    where nothing was computed.
    """

    kind: str
    reason: str = ""
    error: float | None = None
    allowed: float = 0.0

    @property
    def is_right(self) -> bool:
        """Served as Hugging Face does it, or not at all."""
        return self.error is None or self.error <= self.allowed

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.kind}: {self.reason}"
        return f"{self.kind}  [{self.error:.1e} of {self.allowed:.1e}]"


def model_types() -> list[str]:
    """All that the installed `transformers` has a language model for; multimodal ones, too."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def known_outcomes() -> dict[str, list[str]]:
    """The kinds of outcomes that are to come out, for each type in the order of FORMATS."""
    lines = OUTCOMES.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(": ") for line in lines if not line.startswith("#"))
    kinds = {model_type: text.split(", ") for model_type, _, text in pairs}
    return {
        model_type: each if len(each) > 1 else each * len(FORMATS)
        for model_type, each in kinds.items()
    }


def walk(
    model_type: str, directory: Path, formats: Sequence[str] = FORMATS
) -> Iterator[tuple[str, Outcome]]:
    """Outcomes by number format. Raises NotSmall."""
    _make(model_type, directory)
    for number_format in formats:
        yield number_format, _serve(directory, number_format)


def _make(model_type: str, directory: Path) -> None:
    from tests.support.models.tiny_models import make_tiny_config

    try:
        config = make_tiny_config(model_type, None)
        _check_size(config)
        make_tiny_model(model_type, directory, seed=1)
    except NotSmall:
        raise
    except Exception as error:  # configurations and models raise whatever they like
        raise NotSmall(f"{type(error).__name__}: {str(error)[:80]!r}") from error


def _check_size(config: Any) -> None:  # noqa: ANN401
    if config.is_encoder_decoder:
        return
    with torch.device("meta"):
        model = auto_class(config).from_config(copy.deepcopy(config))
    if sum(parameter.numel() for parameter in model.parameters()) > _MAX_NUM_WEIGHTS:
        raise NotSmall("it stays large")


@torch.inference_mode()
def _serve(directory: Path, number_format: str) -> Outcome:
    is_int8 = number_format == "int8"
    dtype = "float32" if is_int8 else number_format
    config = ModelConfig(str(directory), dtype=dtype, task="generate")
    try:
        compute = choose_compute(lambda: load_model(config), AUTO, _BLOCK_SIZE, is_int8=is_int8)
    except (ModelUnsupported, BackendUnavailable) as error:
        return Outcome(REFUSED, str(error).replace(str(directory), ""))
    length = min(_MAX_PROMPT_LEN, compute.loaded.max_model_len)
    generator = torch.Generator().manual_seed(9)
    shape = (1 if dtype == "float32" else _NUM_PROMPTS, length)
    prompts = torch.randint(3, compute.loaded.vocab_size, shape, generator=generator)
    compared = [_compare(compute, directory, dtype, prompt, is_int8=is_int8) for prompt in prompts]
    difference, allowed = sorted(compared, key=lambda pair: pair[0] / pair[1])[len(compared) // 2]
    return Outcome(compute.description.partition(" (")[0], "", difference, allowed)


def _compare(
    compute: Compute, directory: Path, dtype: str, prompt: Tensor, *, is_int8: bool
) -> tuple[float, float]:
    """The error of what is served, and how large it may be."""
    actual = _served_logits(compute, prompt.tolist())
    allowed = _TOLERANCE
    answering = rounded_matrices if is_int8 else nullcontext
    expected = _true_logits(directory, dtype, prompt, answering, in_float32=True)
    if dtype != "float32":
        theirs = _true_logits(directory, dtype, prompt, nullcontext, in_float32=False)
        allowed = torch.finfo(getattr(torch, dtype)).eps
        allowed += _NOISE_FACTOR * relative_error(expected[None], theirs[None])
    return relative_error(expected[None, :, : actual.shape[1]], actual[None]), allowed


def _true_logits(
    directory: Path,
    dtype: str,
    prompt: Tensor,
    answering: Callable[[Any], AbstractContextManager[None]],
    *,
    in_float32: bool,
) -> Tensor:
    from transformers import AutoConfig

    model: Any = auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    model = model.float() if in_float32 else model
    with answering(model):
        logits: Tensor = model(input_ids=prompt[None]).logits[0].float()
    return logits


def _served_logits(compute: Compute, prompt: Sequence[int]) -> Tensor:
    """Logits [len(prompt), V] of all tokens of `prompt`."""
    ends = range(_CHUNK, len(prompt), _CHUNK)
    return served_logits(compute.loaded, compute.make_model, prompt, _BLOCK_SIZE, ends)


def greedy_tokens(compute: Compute, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The best token after `prompt`, and after each of these, as they are served."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(_served_logits(compute, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def check_type(
    model_type: str, known: Mapping[str, Sequence[str]], formats: Sequence[str] = FORMATS
) -> list[str]:
    """A line for each number format; it begins with "!" where it is wrong or not as `known`."""
    expected = dict(zip(FORMATS, known.get(model_type, ()), strict=False))
    with tempfile.TemporaryDirectory() as directory:
        try:
            outcomes = list(walk(model_type, Path(directory), formats))
        except NotSmall as error:
            outcomes = [(FORMATS[0], Outcome(NOT_SMALL, str(error)))]
    return [_line(model_type, each, outcome, expected.get(each)) for each, outcome in outcomes]


def _line(model_type: str, number_format: str, outcome: Outcome, expected: str | None) -> str:
    line = f"{model_type} {number_format}: {outcome}"
    if not outcome.is_right:
        return f"! {line} WRONG"
    return f"  {line}" if outcome.kind == expected else f"! {line} EXPECTED {expected}"


def main() -> int:
    """Goes through the types named, or all; 1 if one is wrong or not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    arguments = parser.parse_args()
    known, num_wrong = known_outcomes(), 0
    for model_type in arguments.types or model_types():
        for line in check_type(model_type, known, arguments.formats):
            num_wrong += line.startswith("!")
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{num_wrong} wrong or not as expected\n")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
