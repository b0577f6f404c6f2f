"""Train the bundled model from nothing and write a directory that transformers can load.

Run it as `python tools/bundled_model/train.py --output DIR --threads 1`. Where other programs keep
the cores busy, more threads are slower unless `OMP_WAIT_POLICY=PASSIVE` is set: they wait for each
other by spinning.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bundled_model.batches import Batch, BatchConfig, generate_batches
from bundled_model.chat_tokenizer import (
    BEGIN_TOKEN,
    END_TOKEN,
    PAD_TOKEN,
    save_tokenizer,
    special_token_id,
    train_tokenizer,
)
from bundled_model.command import parse_arguments, say
from bundled_model.conversation import SamplingConfig, sample_document
from bundled_model.evaluate import MAX_NEW_TOKENS, evaluate, mean_loss

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The training run; with the thread count and the torch build it fixes the result."""

    seed: int = 0
    num_steps: int = 2600
    num_warmup_steps: int = 100
    batch_tokens: int = 2048
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    vocab_size: int = 1536
    num_tokenizer_documents: int = 20_000
    steps_per_report: int = 100


def build_model(tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Return a model with random float32 weights for the vocabulary of `tokenizer`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=special_token_id(tokenizer, BEGIN_TOKEN),
        eos_token_id=special_token_id(tokenizer, END_TOKEN),
        pad_token_id=special_token_id(tokenizer, PAD_TOKEN),
    )
    return LlamaForCausalLM(config)


def sample_tokenizer_texts(config: TrainConfig) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on; few invented words, so few odd merges."""
    sampling = SamplingConfig(invented_noun_ratio=0.1, invented_name_ratio=0.1)
    rng = random.Random(f"tokenizer:{config.seed}")
    for _ in range(config.num_tokenizer_documents):
        yield from (turn.content for turn in sample_document(rng, sampling))


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Return the factor on the learning rate: linear warm-up, then a cosine down to 0.02."""
    if step < config.num_warmup_steps:
        return (step + 1) / config.num_warmup_steps
    progress = (step - config.num_warmup_steps) / (config.num_steps - config.num_warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizers(model: nn.Module, config: TrainConfig) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices of the layers and AdamW for embedding, head and norms.

    Source: Jordan 2024, "Muon"; the step is scaled to the size of an AdamW step.
    """
    named = [*model.named_parameters()]
    matrices = [weight for name, weight in named if weight.dim() > 1 and not _is_of_tokens(name)]
    others = [weight for name, weight in named if weight.dim() == 1 or _is_of_tokens(name)]
    muon = torch.optim.Muon(
        matrices,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    return muon, adamw


def _is_of_tokens(name: str) -> bool:
    return "embed" in name or "lm_head" in name


def train(
    model: _Model,
    batches: Iterator[Batch],
    config: TrainConfig,
    loss_of: Callable[[_Model, Batch], Tensor],
) -> None:
    """Train `model` in place and print the mean loss and the time left as it goes."""
    optimizers = build_optimizers(model, config)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, config)
        )
        for optimizer in optimizers
    ]
    start_s = time.monotonic()
    losses: list[Tensor] = []
    num_tokens = 0
    for step, batch in zip(range(1, config.num_steps + 1), batches, strict=False):
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.detach())
        num_tokens += batch.token_ids.numel()
        if step % config.steps_per_report == 0:
            _report(step, config, losses, num_tokens, time.monotonic() - start_s)
            losses.clear()


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Round the weights of `model` to bfloat16 in place and write config and weights."""
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(directory)
    generation = {
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.pad_token_id,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (directory / "model.safetensors").chmod(0o644)


def main() -> None:
    """Train, save, and evaluate what was saved."""
    config = TrainConfig()
    arguments = parse_arguments(__doc__, config.seed, config.num_steps)
    config = replace(config, seed=arguments.seed, num_steps=arguments.num_steps)
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(mode=True)
    arguments.output.mkdir(parents=True, exist_ok=True)

    start_s = time.monotonic()
    tokenizer = train_tokenizer(sample_tokenizer_texts(config), config.vocab_size)
    model = build_model(tokenizer, config.seed)
    save_tokenizer(tokenizer, arguments.output, model.config.max_position_embeddings)
    say(f"vocabulary {tokenizer.get_vocab_size()}, parameters {model.num_parameters():,}")

    batch_config = BatchConfig(max_num_tokens=config.batch_tokens)
    batches = generate_batches(tokenizer, SamplingConfig(), batch_config, f"train:{config.seed}")
    train(model, batches, config, mean_loss)
    save_model(model, arguments.output)
    say(f"trained in {time.monotonic() - start_s:.0f} s")
    say(json.dumps(evaluate(arguments.output, config.seed), indent=2))


def _report(
    step: int, config: TrainConfig, losses: list[Tensor], num_tokens: int, elapsed_s: float
) -> None:
    left_s = elapsed_s / step * (config.num_steps - step)
    say(
        f"step {step}/{config.num_steps} loss {torch.stack(losses).mean():.4f} "
        f"tokens/s {num_tokens / elapsed_s:.0f} left {left_s:.0f} s"
    )


if __name__ == "__main__":
    main()
