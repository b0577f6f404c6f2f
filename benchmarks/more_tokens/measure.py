"""Engines in turns, and what is known of each run."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.more_tokens.engines import Arrivals, Engine
from benchmarks.more_tokens.texts import Workload
from benchmarks.serving import alone, record
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import load_engine
from splitserve_options import options


@dataclass(frozen=True, slots=True)
class Run:
    """One workload through one engine.

    `ms_per_token`: between the first tokens of a text and its last, the median of its texts.
    `cpu_ms_per_token`: of all processes that serve. `longest_gap_ms`: between tokens of a text.
    `is_right`: whether the texts came as the model knows them.
    """

    engine: str
    workload: str
    ms_per_token: float
    tokens_per_s: float
    cpu_ms_per_token: float
    longest_gap_ms: float
    is_right: bool


def run_in_turns(
    engines: Mapping[str, Engine], workloads: Sequence[Workload], num_runs: int
) -> Iterator[Run]:
    """Each workload `num_runs` times through each engine, in turns; once more before, unseen."""
    for number in range(num_runs + 1):
        for workload in workloads:
            for name, engine in engines.items():
                run = _run(name, engine, workload)
                if number:
                    yield run


def _run(name: str, engine: Engine, workload: Workload) -> Run:
    cpu_s, started_s = _cpu_s(engine), time.perf_counter()
    arrivals: list[Arrivals] = []
    for start in range(0, len(workload.texts), workload.num_at_once):
        arrivals += engine.ask(workload.texts[start : start + workload.num_at_once])
    took_s, cpu_s = time.perf_counter() - started_s, _cpu_s(engine) - cpu_s
    gaps_s = [b - a for each in arrivals for a, b in itertools.pairwise(each.times_s)]
    return Run(
        name,
        workload.name,
        ms_per_token=1e3 * statistics.median(map(_s_per_token, arrivals)),
        tokens_per_s=workload.num_tokens / took_s,
        cpu_ms_per_token=1e3 * cpu_s / workload.num_tokens,
        longest_gap_ms=1e3 * max(gaps_s, default=0.0),
        is_right=[each.token_ids for each in arrivals] == [t.output for t in workload.texts],
    )


def _s_per_token(arrivals: Arrivals) -> float:
    """Of those that came after the first ones."""
    first_s, last_s = arrivals.times_s[0], arrivals.times_s[-1]
    num_later = sum(time_s > first_s for time_s in arrivals.times_s)
    return (last_s - first_s) / max(num_later, 1)


def _cpu_s(engine: Engine) -> float:
    total_s = 0.0
    for process_id in engine.process_ids:
        process = psutil.Process(process_id)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            total_s += times.user + times.system
    return total_s


class StepAlone:
    """What the steps of a workload take with nothing but the runner around them."""

    def __init__(self, model: Path, threads: int) -> None:
        """Loads `model` into this process."""
        flags = ["--model", str(model), "--threads", str(threads)]
        config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
        self._engine = load_engine(config, executor_epoch=1)

    def ms_per_step(self, workload: Workload) -> float:
        """The mean of its decodes, one token of a row a step; prompts are left out."""
        texts = workload.texts[: workload.num_at_once]
        prompts, num_tokens = [text.prompt for text in texts], len(texts[0].output)
        steps = record(self._engine, prompts, num_tokens)
        decodes = [step for step in steps if len(step.token_ids) == len(texts)]
        return 1e3 * alone(self._engine, decodes) / len(decodes)
