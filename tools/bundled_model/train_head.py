"""Train an EAGLE-3 head for the bundled model: one layer that goes on from what that model's say.

Run it as `python tools/bundled_model/train_head.py --output DIR --threads 1`. It learns from the
probabilities of the bundled model, and from states of its own as well as from that model's, as it
has no others behind its first guess.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bundled_model.batches import Batch, BatchConfig, generate_batches
from bundled_model.command import parse_arguments, say
from bundled_model.conversation import SamplingConfig
from bundled_model.eagle3_head import Eagle3Head, HeadShape, save_head
from bundled_model.train import TrainConfig, train
from bundled_model.train_draft import TARGET_DIRECTORY

# What layers return, as the first id is 1; the last one's is what the model's own head reads.
LAYER_IDS: Final = [1, 2, 3]
_CONFIG: Final = TrainConfig(num_steps=1000, num_warmup_steps=50, batch_tokens=1024)
_DRAFT_VOCAB_SIZE: Final = 768
# Guesses that are learned one behind the other, and how many batches say which tokens are frequent.
_DEPTH: Final = 3
_NUM_COUNTED_BATCHES: Final = 100
_NUM_HELD_OUT_BATCHES: Final = 20


def build_head(target: LlamaForCausalLM, token_ids: Tensor, seed: int) -> Eagle3Head:
    """Return a head of the width of `target` with random float32 weights; `token_ids`: [U]."""
    torch.manual_seed(seed)
    config: Any = target.config
    shape = HeadShape(
        width=config.hidden_size,
        mlp_width=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        target_width=config.hidden_size,
        vocab_size=config.vocab_size,
        epsilon=config.rms_norm_eps,
    )
    return Eagle3Head(shape, token_ids)


def frequent_tokens(batches: Iterator[Batch], vocab_size: int, count: int) -> Tensor:
    """Return the `count` tokens [U] that are most often to be said, rising."""
    frequencies = torch.zeros(vocab_size, dtype=torch.int64)
    for _, batch in zip(range(_NUM_COUNTED_BATCHES), batches, strict=False):
        said = batch.labels[batch.labels != -100]
        frequencies += torch.bincount(said, minlength=vocab_size)
    return frequencies.topk(count).indices.sort().values


class Teacher:
    """What a model says of a text, and what its layers return meanwhile."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        """`target` is asked for LAYER_IDS."""
        self._target = target
        self._states: dict[int, Tensor] = {}
        for layer_id in LAYER_IDS:
            target.model.layers[layer_id].register_forward_hook(
                lambda _module, _arguments, states, layer_id=layer_id: self._states.update(
                    {layer_id: states}
                )
            )

    @torch.no_grad()
    def teach(self, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return states [Q, L, 3 M], embeddings [Q, L, M] and logits [Q, L, V]."""
        logits = self._target(input_ids=token_ids).logits
        states = torch.cat([self._states[layer_id] for layer_id in LAYER_IDS], dim=-1)
        return states, self._target.model.embed_tokens(token_ids), logits


def _guesses(head: Eagle3Head, teacher: Teacher, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each depth what `head` says of tokens, [.., U], and what the model does, [.., V].

    Of tokens that are trained on. Where the model has read up to p, the head, which knows the
    token at p + 1, says what is at p + 2.
    """
    states, embedded, logits = teacher.teach(batch.token_ids)
    said = head(states[:, :-1], embedded[:, 1:], _DEPTH)
    is_trained = batch.labels[:, 2:] != -100
    for depth, of_head in enumerate(said):
        # The first positions are too near to the beginning for so deep a guess.
        chosen = is_trained[:, depth:]
        yield of_head[:, depth:-1][chosen], logits[:, 1 + depth : -1][chosen]


def guessing_loss(head: Eagle3Head, teacher: Teacher, batch: Batch) -> Tensor:
    """Return the mean cross entropy with what the model says, in nats, deeper guesses for less."""
    losses = [
        0.8**depth * F.cross_entropy(of_head, wanted.softmax(-1)[:, head.token_ids])
        for depth, (of_head, wanted) in enumerate(_guesses(head, teacher, batch))
    ]
    return torch.stack(losses).sum()


@torch.inference_mode()
def agreement(head: Eagle3Head, teacher: Teacher, batches: Iterator[Batch]) -> list[float]:
    """Return of guesses of each depth how many are the model's most probable tokens."""
    num_equal, num_tokens = torch.zeros(_DEPTH), torch.zeros(_DEPTH)
    for _, batch in zip(range(_NUM_HELD_OUT_BATCHES), batches, strict=False):
        for depth, (of_head, of_model) in enumerate(_guesses(head, teacher, batch)):
            guessed = head.token_ids[of_head.argmax(-1)]
            num_equal[depth] += (guessed == of_model.argmax(-1)).sum()
            num_tokens[depth] += len(guessed)
    return [round(each, 3) for each in (num_equal / num_tokens).tolist()]


def train_head(config: TrainConfig, directory: Path) -> list[float]:
    """Train a head, write it to `directory`, and return its `agreement` on other texts."""
    target = LlamaForCausalLM.from_pretrained(TARGET_DIRECTORY, dtype=torch.float32)
    target.eval()
    teacher = Teacher(target)
    tokenizer = Tokenizer.from_file(str(TARGET_DIRECTORY / "tokenizer.json"))

    def batches(stream: str) -> Iterator[Batch]:
        sizes = BatchConfig(max_num_tokens=config.batch_tokens, pool_size=256)
        return generate_batches(tokenizer, SamplingConfig(), sizes, f"{stream}:{config.seed}")

    vocab_size = tokenizer.get_vocab_size()
    token_ids = frequent_tokens(batches("count"), vocab_size, _DRAFT_VOCAB_SIZE)
    head = build_head(target, token_ids, config.seed)
    say(f"parameters {sum(each.numel() for each in head.parameters()):,}")
    train(
        head,
        batches("train_head"),
        config,
        lambda learner, batch: guessing_loss(learner, teacher, batch),
    )
    head.bfloat16()
    save_head(head, directory, LAYER_IDS, target.config.max_position_embeddings)
    return agreement(head.float(), teacher, batches("held_out"))


def main() -> None:
    """Train, save, and say how often what was saved guesses right."""
    arguments = parse_arguments(__doc__, _CONFIG.seed, _CONFIG.num_steps)
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(mode=True)
    start_s = time.monotonic()
    config = replace(_CONFIG, seed=arguments.seed, num_steps=arguments.num_steps)
    ratios = train_head(config, arguments.output)
    say(f"trained in {time.monotonic() - start_s:.0f} s")
    say(json.dumps({"greedy_ratios_by_depth": ratios}, indent=2))


if __name__ == "__main__":
    main()
