"""A tiny model twice: as the executor runs it, and as Hugging Face does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.model.loaded_model import LoadedModel
from tests.support.models.hugging_face import generate_greedily, load_reference
from tests.support.models.tiny_models import make_tiny_model

MAX_MODEL_LEN = 512


class ModelPair:
    """`served` is ours, `reference` is the other; both have the same float32 weights."""

    def __init__(
        self, architecture: str, directory: Path, *, seed: int = 3, **overrides: object
    ) -> None:
        sizes: Mapping[str, Any] = {"max_position_embeddings": MAX_MODEL_LEN, **overrides}
        make_tiny_model(architecture, directory, seed=seed, overrides=sizes)
        self.served: LoadedModel = load_model(ModelConfig(str(directory)))
        self.reference = load_reference(directory)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def prompts(self, lens: Sequence[int], seed: int = 5) -> list[list[int]]:
        """Random prompts; the same arguments give the same."""
        generator = torch.Generator().manual_seed(seed)
        vocab_size = self.served.vocab_size
        return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lens]

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What greedy `generate` says after `prompt`; nothing ends it earlier."""
        key = tuple(prompt)
        known = self._answers.get(key, [])
        if len(known) < num_tokens:
            known = generate_greedily(self.reference, list(prompt), num_tokens)
            self._answers[key] = known
        return known[:num_tokens]

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """The logprob of each token of `output` after `prompt`."""
        tokens = [*prompt, *output]
        logits = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        chosen = torch.arange(len(prompt) - 1, len(tokens) - 1)
        scored: list[float] = logits.log_softmax(-1)[chosen, list(output)].tolist()
        return scored


def model_pairs(directory_of: Callable[[str], Path]) -> Callable[..., ModelPair]:
    """Makes the pair of an architecture when it is first asked for."""
    made: dict[tuple[object, ...], ModelPair] = {}

    def get(architecture: str, **options: Any) -> ModelPair:  # noqa: ANN401
        key = (architecture, *sorted(options.items()))
        if key not in made:
            made[key] = ModelPair(architecture, directory_of(architecture), **options)
        return made[key]

    return get
