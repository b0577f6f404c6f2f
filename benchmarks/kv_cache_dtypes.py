"""What --kv-cache-dtype costs in accuracy, and what it does to attention, on a CPU.

`perplexity`: of a text, in windows. `kl_divergence`: mean over the positions, in nats, from the
distribution over bfloat16 keys and values; `far_kl_divergence`: of the last quarter of each window.
`same_top_ratio`: how often both have the same most probable token. `attention_ms`: of decodes of
one layer with 8 key/value heads and 4 query heads for each, as fast as it was; `speedup`: over
plain pools, the median of paired rounds in one process.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.quantised_formats import distance, perplexity
from benchmarks.report import emit
from executor_service.backends import choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import KVCache, LayerShape
from executor_service.engine_loader import BUNDLED_DIRECTORY
from executor_service.steps import read_tokenizer_file
from splitserve_kernels.cpu import NativeAttention, load_library
from splitserve_kernels.paged_batch import SLOT_SCALES, AttentionOptions, build_paged_batch
from tests.support.models.model_pair import served_logits

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from bundled_model.grammar import sample_world, tell_story

_NUM_STORIES = 120
_DTYPES = {"auto": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_BLOCK_SIZE = 16
_NUM_KV_HEADS, _GROUP = 8, 4


def _stories() -> str:
    """Returns a text of the kind that the bundled model was trained with."""
    rng = random.Random(7)
    return "\n\n".join(tell_story(rng, sample_world(rng)) for _ in range(_NUM_STORIES))


@torch.inference_mode()
def score(model: str, kv_cache_dtype: str, windows: Sequence[Tensor]) -> list[Tensor]:
    """Returns the log-probabilities of the token after each of a window, [tokens, vocabulary]."""
    config = ModelConfig(model, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    compute = choose_compute(lambda: load_model(config), "native", _BLOCK_SIZE)
    return [
        served_logits(compute.loaded, compute.make_model, window.tolist(), _BLOCK_SIZE)
        .float()
        .log_softmax(-1)
        for window in windows
    ]


def _attend(
    kv_cache_dtype: str, head_dim: int, num_rows: int, context: int
) -> Callable[[], Tensor]:
    """Returns a step of decodes, each after `context` tokens."""
    backend, dtype = NativeAttention(load_library()), _DTYPES[kv_cache_dtype]
    layer = LayerShape(_NUM_KV_HEADS, head_dim, head_dim)
    scales = (SLOT_SCALES,) if dtype.itemsize == 1 else ()
    width = context // _BLOCK_SIZE + 1
    cpu = torch.device("cpu")
    cache = KVCache([layer], _BLOCK_SIZE, num_rows * width, 0, dtype, cpu, scales=scales)
    pools = (cache.key_pools[0], cache.value_pools[0])
    tables = torch.randperm(num_rows * width).view(num_rows, width)
    none, all_rows = torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows).long()
    before = build_paged_batch(tables, none, context * all_rows + 1, _BLOCK_SIZE)
    heads = torch.randn(num_rows * (context + 1), _NUM_KV_HEADS, head_dim).bfloat16()
    backend.write_kv(heads, heads, *pools, before, cache.scales[0])
    decodes = build_paged_batch(tables, context * all_rows, all_rows, _BLOCK_SIZE)
    query = torch.randn(num_rows, _NUM_KV_HEADS * _GROUP, head_dim).bfloat16()
    options = AttentionOptions(head_dim**-0.5)
    return lambda: backend.paged_attention(query, *pools, decodes, options, cache.scales[0])


def time_attention(head_dim: int, num_rows: int, context: int, rounds: int) -> None:
    """Times all dtypes in turn and prints a line for each."""
    runs = {name: _attend(name, head_dim, num_rows, context) for name in _DTYPES}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    for name, seconds in times.items():
        ratios = [plain / each for plain, each in zip(times["auto"], seconds, strict=True)]
        emit(
            "kv_cache_dtypes",
            kv_cache_dtype=name,
            head_dim=head_dim,
            num_rows=num_rows,
            context=context,
            attention_ms=round(1e3 * min(seconds), 2),
            speedup=round(statistics.median(ratios), 3),
        )


def main() -> None:
    """Scores the text and times attention, with each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(BUNDLED_DIRECTORY), help="a checkpoint")
    parser.add_argument("--text", type=Path, help="default: stories as the bundled model knows")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, from its start")
    parser.add_argument("--window", type=int, default=512, help="tokens that see each other")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each timed decode")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    files = load_model(ModelConfig(arguments.model)).tokenizer_files
    tokenizer = Tokenizer.from_buffer(read_tokenizer_file(files["tokenizer.json"]))
    text = arguments.text.read_text(encoding="utf-8") if arguments.text else _stories()
    token_ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    windows = torch.split(token_ids[: arguments.tokens], arguments.window)
    far = [slice(len(window) * 3 // 4, None) for window in windows]
    reference = score(arguments.model, "auto", windows)
    for name in _DTYPES:
        found = score(arguments.model, name, windows)
        divergence, same = distance(reference, found)
        of_far, _ = distance(
            [each[part] for each, part in zip(reference, far, strict=True)],
            [each[part] for each, part in zip(found, far, strict=True)],
        )
        emit(
            "kv_cache_dtypes",
            kv_cache_dtype=name,
            num_tokens=sum(map(len, windows)),
            window=arguments.window,
            perplexity=round(perplexity(found, windows), 4),
            kl_divergence=round(divergence, 6),
            far_kl_divergence=round(of_far, 6),
            same_top_ratio=round(same, 4),
        )
    for head_dim in (64, 128):
        time_attention(head_dim, 8, arguments.context, arguments.rounds)


if __name__ == "__main__":
    main()
