"""Faults of the figures of `splitserve bench`.

GuideLLM finds each of them, too, where it is installed: run_mutant's `--killer
tests/clients/test_bench_figures.py::test_bench_figures_are_those_of_guidellm_under_the_same_load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.mutants.mutant import Mutant

_RECORDER = "splitserve_bench.figures.recorder"
_KILLER = (
    "tests/clients/test_bench_figures.py::test_bench_figures_are_those_that_the_server_recorded"
)

BENCH_MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        "a bench takes the first event for the first token": Mutant(
            "splitserve_bench.targets.openai_target",
            "                    if came:\n",
            "                    if data:\n",
            _KILLER,
        ),
        "a bench counts events as tokens": Mutant(
            "splitserve_bench.load.outcome",
            "            return self.answered.num_output_tokens\n",
            "            return len(self.arrivals_s)\n",
            _KILLER,
        ),
        "a bench's time between tokens is that between events": Mutant(
            _RECORDER,
            'found.append(("itl", gap / num_tokens, num_tokens))',
            'found.append(("itl", gap, 1.0))',
            _KILLER,
        ),
        "a bench's time per token counts the first token": Mutant(
            _RECORDER,
            "spread_s / (num_tokens - 1) if num_tokens > 1 else None",
            "(arrivals[-1] - outcome.due_s) / num_tokens",
            _KILLER,
        ),
        "a bench's rates end when the last request was due": Mutant(
            _RECORDER,
            "so_far.last_end_s = max(so_far.last_end_s, outcome.ended_s)",
            "so_far.last_end_s = max(so_far.last_end_s, outcome.due_s)",
            _KILLER,
        ),
        "a bench keeps one request less open": Mutant(
            "splitserve_bench.load.generator",
            "            for _ in range(concurrency):\n",
            "            for _ in range(concurrency - 1):\n",
            _KILLER,
        ),
    }
)
