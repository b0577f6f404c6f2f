"""What options of the executor change in what a model says: int8 weights, if not told otherwise.

An executor without the options writes texts, sampled with fixed seeds. Then it and one with them
score each token of these texts. `kl_divergence`: the mean of log p - log p', in nats per token,
which estimates how far the distributions are apart. `perplexity`: of the texts, before and after.
`same_top_ratio`: how often both hold the same token for the most probable.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import emit
from benchmarks.serving import serving, wait_until_connected
from splitserve_client import AsyncClient, SamplingParams, collect_generation
from splitserve_text import Prompt, TokenLogprob

_PROMPTS = (
    "Tell me a story about a fox.",
    "Tell me a story about a dragon.",
    "Explain how a bicycle stays upright.",
    "What did people eat in ancient Rome?",
)


@dataclass(frozen=True, slots=True)
class Text:
    """`token_ids`: prompt and answer; the last `num_answer_tokens` are the answer's."""

    token_ids: tuple[int, ...]
    num_answer_tokens: int


async def write(address: str, prompts: Sequence[str], each: int, num_tokens: int) -> list[Text]:
    """`each` answers to every prompt."""
    async with AsyncClient(address) as client:
        tokenizer = await client.get_tokenizer()
        encoded = [tuple(await Prompt(prompt).encode_async(tokenizer)) for prompt in prompts]

        async def answer(token_ids: tuple[int, ...], seed: int) -> Text:
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=num_tokens)
            answered = await collect_generation(client.generate(token_ids, params))
            return Text(token_ids + answered.token_ids, len(answered.token_ids))

        return await asyncio.gather(
            *(answer(token_ids, seed) for token_ids in encoded for seed in range(each))
        )


async def score(address: str, texts: Sequence[Text]) -> list[TokenLogprob]:
    """Scores of all tokens of all answers."""
    params = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=1)
    async with AsyncClient(address) as client:
        scored = await asyncio.gather(
            *(collect_generation(client.generate(text.token_ids, params)) for text in texts)
        )
    return [
        token
        for text, answer in zip(texts, scored, strict=True)
        for token in answer.prompt_logprobs[-text.num_answer_tokens :]
    ]


def perplexity(scores: Sequence[TokenLogprob]) -> float:
    """Of the tokens that were scored."""
    return math.exp(-statistics.fmean(score.logprob for score in scores))


def main() -> None:
    """Writes, scores twice, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--prompts", nargs="*", default=_PROMPTS)
    parser.add_argument("--each", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--options", default="--quantization int8", help="of the executor")
    arguments = parser.parse_args()
    common = (arguments.model, arguments.threads)
    with serving(*common) as address:
        asyncio.run(wait_until_connected(address))
        texts = asyncio.run(write(address, arguments.prompts, arguments.each, arguments.tokens))
        before = asyncio.run(score(address, texts))
    with serving(*common, *arguments.options.split()) as address:
        asyncio.run(wait_until_connected(address))
        after = asyncio.run(score(address, texts))
    pairs = list(zip(before, after, strict=True))
    emit(
        "accuracy",
        options=arguments.options,
        kl_divergence=round(statistics.fmean(a.logprob - b.logprob for a, b in pairs), 6),
        perplexity={"before": round(perplexity(before), 4), "after": round(perplexity(after), 4)},
        same_top_ratio=round(
            statistics.fmean(a.top[0].token_id == b.top[0].token_id for a, b in pairs), 4
        ),
        num_tokens=len(pairs),
    )


if __name__ == "__main__":
    main()
