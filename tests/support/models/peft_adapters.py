"""Random adapters that PEFT makes, saves and applies."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitserve_adapters import AdapterFiles
from tests.support.models.tiny_models import auto_class


def make_adapter(model: Path, directory: Path, seed: int = 0, **options: object) -> Any:  # noqa: ANN401
    """Saves an adapter of the model in folder `model` in `directory`, and returns PEFT's model.

    `options`: of `LoraConfig`. All that would be trained is random, and changes the logits.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig

    base_class = auto_class(AutoConfig.from_pretrained(model))
    base: Any = base_class.from_pretrained(model, attn_implementation="eager")
    config: Any = LoraConfig(task_type="CAUSAL_LM", **options)  # type: ignore[arg-type]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # PEFT warns of tied weights, and of fan_in_fan_out.
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(base, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if not parameter.requires_grad:
                    continue
                if "lora_" in name and "magnitude" not in name:
                    parameter.normal_(std=0.1)
                else:
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter)).add_(0.01)
        adapted.save_pretrained(directory)
    return adapted.eval()


def logits_of(adapted: Any, tokens: Sequence[int]) -> Tensor:  # noqa: ANN401
    """Returns the logits [L, V] of PEFT's model, or of another one of `transformers`."""
    with torch.inference_mode():
        logits: Tensor = adapted(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def files_of(directory: Path) -> dict[str, bytes]:
    """Returns the files of an adapter, by name."""
    with AdapterFiles.open(directory) as files:
        return files.read()
