"""Small EAGLE-3 heads for the tiny models, random or trained to continue a few texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.models.tiny_models import VOCAB_SIZE

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bundled_model.eagle3_head import Eagle3Head, HeadShape, save_head

# What is given to the layers, and what the last of two returns.
LAYER_IDS = [0, 1, 2]
TINY_SHAPE = HeadShape(
    width=64,
    mlp_width=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    target_width=64,
    vocab_size=VOCAB_SIZE,
)
_NUM_POSITIONS = 512


def make_tiny_head(directory: Path, seed: int = 0, shape: HeadShape = TINY_SHAPE) -> Path:
    """Saves a random head for a model of `make_tiny_model` with two layers; returns `directory`."""
    head = random_head(shape, seed)
    save_head(head, directory, LAYER_IDS, _NUM_POSITIONS)
    return directory


def random_head(shape: HeadShape, seed: int) -> Eagle3Head:
    """Random head that can propose most tokens, but not the first ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(shape, torch.arange(shape.vocab_size // 8, shape.vocab_size))
        with torch.no_grad():
            for parameter in head.parameters():
                # Norms and all matter, and scores are far apart.
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return head.eval()


def make_trained_head(
    directory: Path, model_directory: Path, prompts: Sequence[Sequence[int]], num_new: int
) -> Path:
    """Saves a head that has learned how the model continues `prompts`, all of one length."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        tokens = torch.tensor(prompts)
        for _ in range(num_new):
            following = model(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        states, embedded = states_of(model, tokens)
        torch.manual_seed(0)
        head = Eagle3Head(TINY_SHAPE, torch.arange(VOCAB_SIZE))
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(80):
        losses = []
        guesses = head(states[:, :-1], embedded[:, 1:], depth=3)
        for depth, logits in enumerate(guesses):
            wanted = tokens[:, 2 + depth :].flatten()
            losses.append(F.cross_entropy(logits[:, depth:-1].flatten(0, 1), wanted))
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack(losses).sum())
        optimizer.step()
    save_head(head, directory, LAYER_IDS, _NUM_POSITIONS)
    return directory


@torch.no_grad()
def states_of(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """The states [Q, L, 3 W] that `model` has at LAYER_IDS of `tokens` [Q, L], and embeddings."""
    returned: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _module, _arguments, output: returned.append(output)
    )
    # What transformers calls the last hidden state is normalized already.
    hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states
    hook.remove()
    states = [*hidden[:-1], *returned]
    return torch.cat([states[layer] for layer in LAYER_IDS], dim=-1), hidden[0]
