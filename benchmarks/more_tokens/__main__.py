"""What a token costs served: one a step, running on, and with lookup, beside llama.cpp's server.

A model of the shape of a Llama with 160 million parameters is made that says some texts by heart
(`rehearsed_model.py`), so that all engines say the same, which is checked: text that repeats
nothing, source code with some of its names changed, and sentences that quote the prompt
(`texts.py`). Measured is what engines make of such text, greedy, on all cores, each through its own
protocol; not how well a model would edit or quote. Engines take turns, run by run. `step alone` is
the runner in this process, without scheduler, wire and clients.

llama.cpp: its `llama-server`, built from source (`cmake -B build -DGGML_NATIVE=ON` and `cmake
--build build --target llama-server`), and the package `gguf`; without `--llama-server` it is left
out. Prints a JSON object for each run, and tables; `--out` writes both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.more_tokens.engines import (
    LLAMA_VARIANTS,
    Engine,
    llama_server,
    splitserve,
    splitserve_variants,
)
from benchmarks.more_tokens.measure import Run, StepAlone, run_in_turns
from benchmarks.more_tokens.rehearsed_model import Shape, write_gguf, write_rehearsed
from benchmarks.more_tokens.texts import Workload, make_workloads, next_tokens
from benchmarks.report import emit

_TINY = Shape(4000, 64, 2, 4, 2, 128, 1024)
_STEP_ALONE = "step alone"


def main() -> None:
    """Measures and prints."""
    arguments = _arguments()
    num_texts, num_tokens = (1, 96) if arguments.quick or arguments.tiny else (2, 384)
    workloads = make_workloads(num_texts, num_tokens)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="more-tokens-") as folder:
        model = Path(folder) / "model"
        write_rehearsed(model, next_tokens(workloads), _TINY if arguments.tiny else Shape())
        with _engines(arguments, model) as engines:
            for run in run_in_turns(engines, workloads, arguments.runs):
                emit("more_tokens", **asdict(run), threads=arguments.threads)
                runs.append(run)
        step = StepAlone(model, arguments.threads)
        steps_ms = {
            workload.name: statistics.median(
                step.ms_per_step(workload) for _ in range(arguments.runs)
            )
            for workload in workloads
            if workload.name.startswith("random")
        }
    for name, ms in steps_ms.items():
        emit("more_tokens", engine=_STEP_ALONE, workload=name, ms_per_step=round(ms, 3))
    text = "\n\n".join(_tables(runs, workloads, steps_ms))
    sys.stdout.write(text + "\n")
    if arguments.out is not None:
        _write(arguments.out, arguments.threads, runs, steps_ms, text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's program of that name")
    parser.add_argument("--runs", type=int, default=3, help="of each engine, of which medians are")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", help="these engines, by a part of their names")
    parser.add_argument("--quick", action="store_true", help="one short text of each kind")
    parser.add_argument("--tiny", action="store_true", help="and a tiny model: only to try this")
    parser.add_argument("--out", type=Path, help="a path to which .json and .md are added")
    return parser.parse_args()


@contextmanager
def _engines(arguments: argparse.Namespace, model: Path) -> Iterator[Mapping[str, Engine]]:
    """All of them, running; who is not asked anything sleeps."""
    threads = arguments.threads
    with ExitStack() as running:
        engines: dict[str, Engine] = {}
        runner = running.enter_context(asyncio.Runner())
        for name, more in splitserve_variants().items():
            if _is_wanted(name, arguments.only):
                engines[name] = running.enter_context(splitserve(model, threads, more, runner))
        if arguments.llama_server is not None:
            gguf = model.with_suffix(".gguf")
            write_gguf(model, gguf)
            for name, more in LLAMA_VARIANTS.items():
                if _is_wanted(name, arguments.only):
                    program = arguments.llama_server
                    engines[name] = running.enter_context(
                        llama_server(program, gguf, threads, more)
                    )
        yield engines


def _is_wanted(name: str, only: Sequence[str] | None) -> bool:
    return not only or any(part in name for part in only)


def _tables(
    runs: Sequence[Run], workloads: Sequence[Workload], steps_ms: Mapping[str, float]
) -> Iterator[str]:
    """Markdown, medians and in brackets the least and the most."""
    figures: dict[str, Callable[[Run], float]] = {
        "ms a token and text": lambda run: run.ms_per_token,
        "tokens/s": lambda run: run.tokens_per_s,
        "ms of CPU a token": lambda run: run.cpu_ms_per_token,
        "longest gap, ms": lambda run: run.longest_gap_ms,
    }
    names = [workload.name for workload in workloads]
    shares = [statistics.mean(t.taken_over_ratio for t in each.texts) for each in workloads]
    for title, figure in figures.items():
        lines = [f"| {title} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for engine in dict.fromkeys(run.engine for run in runs):
            cells = [
                _range([figure(r) for r in runs if (r.engine, r.workload) == (engine, name)])
                for name in names
            ]
            lines.append(f"| {engine} | {' | '.join(cells)} |")
        if title.startswith("ms a token"):
            cells = [f"{steps_ms[name]:.2f}" if name in steps_ms else "" for name in names]
            lines.append(f"| {_STEP_ALONE} | {' | '.join(cells)} |")
            cells = [f"{share:.0%}" for share in shares]
            lines.append(f"| *of the output is in the prompt* | {' | '.join(cells)} |")
        yield "\n".join(lines)
    wrong = sorted({(run.engine, run.workload) for run in runs if not run.is_right})
    yield f"Other tokens than the model knows: {wrong or 'none'}."


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _write(
    out: Path, threads: int, runs: Sequence[Run], steps_ms: Mapping[str, float], text: str
) -> None:
    content = {"threads": threads, "steps_ms": steps_ms, "runs": [asdict(run) for run in runs]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    out.with_name(out.name + ".md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
