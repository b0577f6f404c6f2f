"""Measure a saved model: held-out loss, and what its greedy stories do with the asked noun."""

import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from bundled_model import words
from bundled_model.batches import Batch, BatchConfig, generate_batches
from bundled_model.consistency import is_consistent
from bundled_model.conversation import SamplingConfig, request_story
from bundled_model.grammar import invent_word

MAX_NEW_TOKENS: Final = 400

SAMPLE_REQUESTS: Final[tuple[str, ...]] = (
    "Tell me a story about a fox.",
    "story about a dragon please",
    "Can you tell me a short story with a bear in the forest?",
    "Tell me a story about a giraffe.",
    "Who are you?",
)


@dataclass(frozen=True, slots=True)
class NounReport:
    """Shares of greedy answers, each in [0, 1].

    `mentioned_ratio`: the asked noun occurs. `hero_ratio`: the first sentence introduces it.
    `ended_ratio`: the answer ends with the end token. `consistent_ratio`: the story grammar could
    have told the whole answer, with every name, noun and thing kept.
    """

    num_requests: int
    mentioned_ratio: float
    hero_ratio: float
    ended_ratio: float
    consistent_ratio: float


def mean_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the mean cross entropy, in nats per trained token, as a scalar."""
    hidden = model.model(input_ids=batch.token_ids).last_hidden_state[:, :-1]
    labels = batch.labels[:, 1:]
    is_target = labels != -100
    return F.cross_entropy(model.lm_head(hidden[is_target]).float(), labels[is_target])


def evaluate(directory: Path, seed: int) -> dict[str, Any]:
    """Return the measures of the model in `directory`, computed in float32."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.nn.Module.eval(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    rng = random.Random(f"evaluate:{seed}")
    invented = [invent_word(rng) for _ in range(100)]
    return {
        "held_out_loss": held_out_loss(model, tokenizer, seed),
        "listed_animals": asdict(report_nouns(model, tokenizer, words.ANIMALS, rng)),
        "held_out_animals": asdict(report_nouns(model, tokenizer, words.HELD_OUT_ANIMALS * 5, rng)),
        "new_invented_words": asdict(report_nouns(model, tokenizer, tuple(invented), rng)),
        "samples": dict(
            zip(SAMPLE_REQUESTS, answer(model, tokenizer, SAMPLE_REQUESTS), strict=True)
        ),
    }


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> float:
    """Return the mean loss over 40 batches drawn from a stream that training never sees."""
    batches = generate_batches(
        tokenizer.backend_tokenizer,
        SamplingConfig(),
        BatchConfig(max_num_tokens=4096),
        f"held_out:{seed}",
    )
    losses = [mean_loss(model, batch) for batch in islice(batches, 40)]
    return round(float(torch.stack(losses).mean()), 4)


def report_nouns(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    nouns: tuple[str, ...],
    rng: random.Random,
) -> NounReport:
    """Ask for one story about each of `nouns`, in varied words, and count."""
    requests = [request_story(rng, noun) for noun in nouns]
    answers = answer(model, tokenizer, tuple(requests), keep_end=True)
    asked = list(zip(answers, nouns, strict=True))
    end = str(tokenizer.eos_token)
    return NounReport(
        num_requests=len(nouns),
        mentioned_ratio=_ratio(_mentions(text, noun) for text, noun in asked),
        hero_ratio=_ratio(_mentions(text.split(".")[0], noun) for text, noun in asked),
        ended_ratio=_ratio(text.endswith(end) for text in answers),
        consistent_ratio=_ratio(is_consistent(text.removesuffix(end)) for text in answers),
    )


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    requests: tuple[str, ...],
    *,
    keep_end: bool = False,
) -> list[str]:
    """Return the greedy answer to each request; with `keep_end` the end token stays in the text."""
    answers: list[str] = []
    for start in range(0, len(requests), 20):
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
            )
            for request in requests[start : start + 20]
        ]
        inputs = tokenizer(
            prompts,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        for row in output[:, inputs["input_ids"].shape[1] :]:
            text = str(tokenizer.decode(row)).replace(str(tokenizer.pad_token), "")
            answers.append(text if keep_end else text.removesuffix(str(tokenizer.eos_token)))
    return answers


def _ratio(facts: Iterable[bool]) -> float:
    values = list(facts)
    return round(sum(values) / len(values), 3)


def _mentions(text: str, noun: str) -> bool:
    return re.search(rf"\b{re.escape(noun)}\b", text, re.IGNORECASE) is not None
