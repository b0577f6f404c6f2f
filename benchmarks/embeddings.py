"""Embeddings beside sentence-transformers: texts/s, and the latency of one short text.

A random model of MiniLM's shape is saved with its tokenizer and its files of sentence-transformers.
`embeddings_rate`: the same texts through scheduler and executor, and through
`SentenceTransformer.encode` at its best batch size, in turns in one run. `embeddings_short`: one
short text after the other through the services, and the bare forward pass of the model on the same
tokens, some dozens at a time, since threads of either keep spinning for a moment after a pass. Both
have the same number of threads, and compute in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import emit, percentile
from benchmarks.serving import serving, wait_until_connected
from splitserve_client import AsyncClient

_VOCAB_SIZE = 30522
_NUM_WORDS = 20_000
_MAX_TOKENS = 512
# Short texts of a block, and how many of its first times are left out.
_BLOCK, _NUM_DROPPED = 40, 5
_BATCH_SIZES = (8, 16, 32, 64, 128)


def make_model(directory: Path) -> Any:  # noqa: ANN401
    """Saves a random MiniLM (6 layers of 384, 12 heads); returns it, of sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=_MAX_TOKENS,
    )
    plain = directory / "plain"
    model: Any = BertModel(config)
    model.save_pretrained(plain)
    names = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(_NUM_WORDS)))
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(plain)
    transformer = Transformer(str(plain))
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    made: Any = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
    made.save(str(directory / "model"))
    return SentenceTransformer(str(directory / "model"), device="cpu")


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of random words, mostly of some dozens, a few of hundreds."""
    rng = random.Random(seed)
    lengths = (min(round(rng.lognormvariate(3.7, 0.8)) + 1, _MAX_TOKENS - 2) for _ in range(count))
    return [" ".join(f"w{rng.randrange(_NUM_WORDS)}" for _ in range(length)) for length in lengths]


# -- Rates -----------------------------------------------------------------------------------------


async def served_rate(address: str, texts: list[str]) -> float:
    """Texts per second through the services."""
    async with AsyncClient(address) as client:
        start = time.perf_counter()
        vectors = await client.embed(texts)
        assert len(vectors) == len(texts)
        return len(texts) / (time.perf_counter() - start)


def encoded_rate(reference: Any, texts: list[str], batch_size: int) -> float:  # noqa: ANN401
    """Texts per second by sentence-transformers."""
    start = time.perf_counter()
    reference.encode(texts, batch_size=batch_size, show_progress_bar=False)
    return len(texts) / (time.perf_counter() - start)


def measure_rates(
    address: str,
    reference: Any,  # noqa: ANN401
    arguments: argparse.Namespace,
    runner: asyncio.Runner,
) -> None:
    """Compares rates, in turns."""
    texts = make_texts(arguments.texts, 1)
    num_tokens = sum(len(text.split()) + 2 for text in texts)
    few = texts[: len(texts) // 4]
    runner.run(served_rate(address, few))
    best = max(_BATCH_SIZES, key=lambda size: encoded_rate(reference, few, size))
    ours, theirs = [], []
    for _ in range(arguments.runs):
        ours.append(runner.run(served_rate(address, texts)))
        theirs.append(encoded_rate(reference, texts, best))
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    emit(
        "embeddings_rate",
        texts_per_s=round(statistics.median(ours), 1),
        sentence_transformers_texts_per_s=round(statistics.median(theirs), 1),
        batch_size=best,
        ratio=round(statistics.median(ratios), 3),
        texts=len(texts),
        tokens_per_text=round(num_tokens / len(texts), 1),
        runs=arguments.runs,
        threads=arguments.threads,
    )


# -- One short text --------------------------------------------------------------------------------


async def short_latencies(
    address: str,
    model: Any,  # noqa: ANN401
    arguments: argparse.Namespace,
) -> tuple[list[float], list[float]]:
    """Milliseconds of each request, and of each bare forward pass, without the first of a block."""
    ours, bare = [], []
    async with AsyncClient(address) as client:
        tokenizer = await client.get_tokenizer()
        for first in range(0, arguments.short_texts, _BLOCK):
            prompts = [
                tokenizer.encode(" ".join(text.split()[: arguments.short_words]))
                for text in make_texts(_BLOCK, first)
            ]
            times = []
            for prompt in prompts:
                start = time.perf_counter()
                await client.pool(prompt)
                times.append(1e3 * (time.perf_counter() - start))
            ours += times[_NUM_DROPPED:]
            times = []
            for prompt in prompts:
                inputs = torch.tensor([prompt])
                start = time.perf_counter()
                with torch.inference_mode():
                    model(input_ids=inputs, attention_mask=torch.ones_like(inputs))
                times.append(1e3 * (time.perf_counter() - start))
            bare += times[_NUM_DROPPED:]
    return ours, bare


def measure_short(
    address: str,
    reference: Any,  # noqa: ANN401
    arguments: argparse.Namespace,
    runner: asyncio.Runner,
) -> None:
    """Compares latencies, block by block."""
    model = reference[0].auto_model
    runner.run(short_latencies(address, model, arguments))
    ours, bare = runner.run(short_latencies(address, model, arguments))
    emit(
        "embeddings_short",
        ms_p50=round(statistics.median(ours), 3),
        ms_p99=percentile(ours, 99),
        forward_ms_p50=round(statistics.median(bare), 3),
        ratio=round(statistics.median(ours) / statistics.median(bare), 3),
        words=arguments.short_words,
        texts=arguments.short_texts,
        threads=arguments.threads,
    )


def main() -> None:
    """Makes the model, starts the services, and measures both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--short-texts", type=int, default=300)
    parser.add_argument("--short-words", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        reference = make_model(Path(directory))
        model = str(Path(directory) / "model")
        with (
            serving(model, arguments.threads, "--dtype", "float32") as address,
            asyncio.Runner() as runner,
        ):
            runner.run(wait_until_connected(address))
            measure_short(address, reference, arguments, runner)
            measure_rates(address, reference, arguments, runner)


if __name__ == "__main__":
    main()
