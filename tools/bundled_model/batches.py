"""Endless training batches: documents of similar length, padded, never packed together."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bundled_model.chat_tokenizer import EncodedDocument, encode_document
from bundled_model.conversation import SamplingConfig, sample_document


@dataclass(frozen=True, slots=True)
class Batch:
    """Input ids and labels, both `[batch_size, num_tokens]`, int64; labels -100 where untrained.

    Padding is on the right: under causal attention no real token sees it.
    """

    token_ids: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How batches are cut: `pool_size` documents are sorted by length and cut at `max_num_tokens`.

    `max_num_tokens` counts padding too.
    """

    max_num_tokens: int
    pool_size: int = 1024
    max_document_tokens: int = 1024


def generate_batches(
    tokenizer: Tokenizer, sampling: SamplingConfig, config: BatchConfig, stream: str
) -> Iterator[Batch]:
    """Yield batches forever; equal arguments give equal batches. `stream` names the seed."""
    pool_id = 0
    while True:
        rng = random.Random(f"{stream}:{pool_id}")
        pool = [_sample_encoded(rng, tokenizer, sampling) for _ in range(config.pool_size)]
        groups = _group_by_length(pool, config)
        rng.shuffle(groups)
        yield from (_pad(group) for group in groups)
        pool_id += 1


def _sample_encoded(
    rng: random.Random, tokenizer: Tokenizer, sampling: SamplingConfig
) -> EncodedDocument:
    document = sample_document(rng, sampling)
    is_plain = document[0].role == "text"
    return encode_document(tokenizer, document, has_begin_token=not is_plain or rng.random() < 0.5)


def _group_by_length(
    pool: list[EncodedDocument], config: BatchConfig
) -> list[list[EncodedDocument]]:
    fitting = [item for item in pool if len(item.token_ids) <= config.max_document_tokens]
    groups: list[list[EncodedDocument]] = [[]]
    for item in sorted(fitting, key=lambda item: len(item.token_ids)):
        if (len(groups[-1]) + 1) * len(item.token_ids) > config.max_num_tokens:
            groups.append([])
        groups[-1].append(item)
    return [group for group in groups if group]


def _pad(group: list[EncodedDocument]) -> Batch:
    num_tokens = max(len(item.token_ids) for item in group)
    token_ids = torch.zeros(len(group), num_tokens, dtype=torch.int64)
    labels = torch.full_like(token_ids, -100)
    for row, item in enumerate(group):
        ids = torch.tensor(item.token_ids)
        token_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = torch.where(torch.tensor(item.is_target), ids, -100)
    return Batch(token_ids, labels)
