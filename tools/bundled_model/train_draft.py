"""Train a draft of the bundled model: a smaller one that guesses what it will say.

Run it as `python tools/bundled_model/train_draft.py --output DIR --threads 1`. It learns from the
probabilities of the bundled model, not from the text: a guess counts if that model says the same.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bundled_model.batches import Batch, BatchConfig, generate_batches
from bundled_model.command import parse_arguments, say
from bundled_model.conversation import SamplingConfig
from bundled_model.train import TrainConfig, save_model, train

TARGET_DIRECTORY: Final = Path(__file__).parents[2] / "executor_service" / "bundled_model"
# Less is to be learned than by the model itself; half as much a step gives more steps.
_CONFIG: Final = TrainConfig(batch_tokens=1024)
_NUM_HELD_OUT_BATCHES = 40


def build_draft(target: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """Return a model with random float32 weights for the vocabulary of `target`.

    Two layers are the fewest that can copy a name which they do not know.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=target.config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=target.config.bos_token_id,
        eos_token_id=target.config.eos_token_id,
        pad_token_id=target.config.pad_token_id,
    )
    return LlamaForCausalLM(config)


def _logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return `[num_targets, vocab_size]` of the tokens that are trained on."""
    hidden = model.model(input_ids=batch.token_ids).last_hidden_state[:, :-1]
    logits: Tensor = model.lm_head(hidden[batch.labels[:, 1:] != -100]).float()
    return logits


def distillation_loss(model: LlamaForCausalLM, target: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the cross entropy with what `target` says, in nats per token, as a scalar."""
    with torch.inference_mode():
        wanted = _logits(target, batch).softmax(-1)
    return F.cross_entropy(_logits(model, batch), wanted.clone())


@torch.inference_mode()
def agreement(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, batches: Iterator[Batch]
) -> dict[str, float]:
    """Return how often both say the same of the same text, each in [0, 1].

    `greedy_ratio`: their most probable tokens are equal. `common_ratio`: what their distributions
    have in common, which is the most that any way to draw from both can make equal.
    """
    num_equal, common, num_tokens = 0, 0.0, 0
    for _, batch in zip(range(_NUM_HELD_OUT_BATCHES), batches, strict=False):
        of_draft, of_target = _logits(draft, batch), _logits(target, batch)
        num_equal += int((of_draft.argmax(-1) == of_target.argmax(-1)).sum())
        common += float(torch.minimum(of_draft.softmax(-1), of_target.softmax(-1)).sum())
        num_tokens += len(of_draft)
    return {
        "greedy_ratio": round(num_equal / num_tokens, 3),
        "common_ratio": round(common / num_tokens, 3),
    }


def main() -> None:
    """Train, save, and say how often what was saved guesses right."""
    arguments = parse_arguments(__doc__, _CONFIG.seed, _CONFIG.num_steps)
    config = replace(_CONFIG, seed=arguments.seed, num_steps=arguments.num_steps)
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(mode=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()

    target = LlamaForCausalLM.from_pretrained(TARGET_DIRECTORY, dtype=torch.float32)
    target.eval()
    tokenizer = Tokenizer.from_file(str(TARGET_DIRECTORY / "tokenizer.json"))
    draft = build_draft(target, config.seed)
    say(f"parameters {draft.num_parameters():,}")

    def batches(stream: str) -> Iterator[Batch]:
        sizes = BatchConfig(max_num_tokens=config.batch_tokens)
        return generate_batches(tokenizer, SamplingConfig(), sizes, f"{stream}:{config.seed}")

    train(
        draft,
        batches("train_draft"),
        config,
        lambda model, batch: distillation_loss(model, target, batch),
    )
    save_model(draft, arguments.output)
    say(f"trained in {time.monotonic() - start_s:.0f} s")
    saved = LlamaForCausalLM.from_pretrained(arguments.output, dtype=torch.float32)
    saved.eval()
    say(json.dumps(agreement(saved, target, batches("held_out")), indent=2))


if __name__ == "__main__":
    main()
