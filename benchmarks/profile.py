"""Where the time of a step goes on a CPU, beside what the machine could do.

Decode steps of few rows and of many, behind a context, and a step that computes a prompt, all of
them for a model that the native decoder runs. `of limit` is the share of its time
that a part would take if all it reads came at the memory bandwidth and all it computes at the rate
of matrix products, whichever takes longer; both are measured in this run, by plain torch. Prints a
JSON object for each part of each step, and tables.

Parts: `messages` is a batch decoded, checked and written into the row table, and its answer
encoded; `inputs` what Python does to call the native decoder; `norms` has the embedding, too, and
of few rows nothing else: each thread then normalises what it multiplies; `kv_write` the rotary
embedding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.cpu_limits import Cost, CpuLimits, StepSize, measure_limits, part_costs
from benchmarks.report import emit, print_table
from benchmarks.timed_steps import TimedExecutor, num_blocks
from executor_service.checkpoint import resolve_checkpoint
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import BUNDLED_DIRECTORY, LoadedEngine, load_engine
from splitserve_options import BUNDLED_MODEL, options

_BLOCK_SIZE = 16
# Figures of a part: key in JSON -> title in the table and digits behind the point.
_FIGURES = MappingProxyType(
    {
        "ms": ("ms", 3),
        "share": ("share", 3),
        "gflops": ("GFLOP/s", 1),
        "gb_per_s": ("GB/s", 1),
        "of_limit": ("of limit", 2),
    }
)


def main() -> None:
    """Loads the model and prints the profile of each kind of step."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    config = _text_config(arguments.model)
    context = min(arguments.context, config.max_position_embeddings // 2)
    sizes = [StepSize(num_rows, 1, context) for num_rows in arguments.rows]
    sizes.append(StepSize(1, min(arguments.prompt, config.max_position_embeddings // 2), 0))
    engine = _load(arguments, sizes)
    if "native decoder" not in engine.compute:
        sys.exit(f"{engine.architecture} runs with {engine.compute}, which cannot be taken apart")
    dtype = getattr(torch, engine.info.model.dtype)
    limits = measure_limits(dtype)
    emit(
        "profile_limits",
        gb_per_s=round(limits.bytes_per_s / 1e9, 1),
        gflops=round(limits.flops_per_s / 1e9, 1),
        dtype=engine.info.model.dtype,
        threads=torch.get_num_threads(),
    )
    executor = TimedExecutor(engine)
    weight_bytes = 1 if arguments.quantization == "int8" else dtype.itemsize
    figures = {}
    for size in sizes:
        times_ms = executor.time_steps(size, arguments.steps)
        costs = part_costs(config, size, weight_bytes, dtype.itemsize)
        figures[size] = _figures(times_ms, costs, limits)
        for part, of_part in figures[size].items():
            emit("profile", step=_name(size), part=part, **of_part)
    for size, of_step in figures.items():
        _print_step(size, of_step)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64], help="of decode steps")
    parser.add_argument("--context", type=int, default=512, help="tokens before those of a decode")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--steps", type=int, default=20, help="of which the median is taken")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def _text_config(model: str) -> Any:  # noqa: ANN401
    from transformers import AutoConfig

    is_bundled = model == BUNDLED_MODEL
    directory = BUNDLED_DIRECTORY if is_bundled else resolve_checkpoint(model).directory
    return AutoConfig.from_pretrained(directory).get_text_config(decoder=True)


def _load(arguments: argparse.Namespace, sizes: list[StepSize]) -> LoadedEngine:
    blocks = max(num_blocks(size, arguments.steps, _BLOCK_SIZE) for size in sizes)
    flags = [
        *("--model", arguments.model, "--device", "cpu", "--dtype", arguments.dtype),
        *("--quantization", arguments.quantization, "--block-size", str(_BLOCK_SIZE)),
        *("--num-device-blocks", str(blocks), "--num-host-blocks", "0"),
    ]
    config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
    return load_engine(config, executor_epoch=1)


def _figures(
    times_ms: Mapping[str, float], costs: Mapping[str, Cost], limits: CpuLimits
) -> dict[str, dict[str, float]]:
    """For each part of a step what is known of it, by the keys of _FIGURES."""
    least_s = {part: limits.seconds(cost) for part, cost in costs.items()}
    least_s["step"] = sum(least_s.values())
    costs = {**costs, "step": _sum(costs.values())}
    figures = {}
    for part, ms in times_ms.items():
        of_part = {"ms": ms, "share": ms / times_ms["step"]}
        if part in costs:
            of_part["gflops"] = costs[part].num_flops / ms / 1e6
            of_part["gb_per_s"] = costs[part].num_bytes / ms / 1e6
            of_part["of_limit"] = least_s[part] * 1e3 / ms
        figures[part] = {key: round(value, _FIGURES[key][1]) for key, value in of_part.items()}
    return figures


def _sum(costs: Collection[Cost]) -> Cost:
    return Cost(sum(cost.num_bytes for cost in costs), sum(cost.num_flops for cost in costs))


def _print_step(size: StepSize, figures: Mapping[str, Mapping[str, float]]) -> None:
    lines = [[_name(size), *(title for title, _ in _FIGURES.values())]]
    for part, of_part in figures.items():
        texts = [
            f"{of_part[key]:.{digits}f}" if key in of_part else ""
            for key, (_, digits) in _FIGURES.items()
        ]
        lines.append([part, *texts])
    print_table(lines)
    sys.stdout.write("\n")


def _name(size: StepSize) -> str:
    if not size.num_computed:
        return f"a prompt of {size.num_new} tokens"
    return f"{size.num_rows} decodes behind {size.num_computed} tokens"


if __name__ == "__main__":
    main()
