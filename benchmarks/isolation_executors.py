"""Several executors in one process, whose steps take as long as their costs say.

`python -m benchmarks.isolation_executors SCHEDULER EXECUTORS ROWS BLOCKS HOST_BLOCKS`. Tokens are
the letters of `letters_executor`. Steps wait without using a core, each executor in a thread of its
own.
"""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks.letters_executor import LettersRunner, describe, serve_info
from executor_service.steps import FinishedStep, StepInput

STEP_S = 0.02
ROW_S = 50e-6
PROMPT_TOKEN_S = 50e-6


class CostlyRunner(LettersRunner):
    """Steps that take longer the more rows and prompt tokens they have."""

    def __init__(self) -> None:
        super().__init__(step_s=0.0)

    def begin(self, step: StepInput) -> FinishedStep:
        """All rows at once."""
        num_prompt_tokens = int(step.num_new_tokens[step.num_new_tokens > 1].sum())
        time.sleep(STEP_S + ROW_S * step.num_rows + PROMPT_TOKEN_S * num_prompt_tokens)
        return super().begin(step)


async def serve(
    scheduler: str, num_executors: int, num_rows: int, num_blocks: int, num_host_blocks: int
) -> None:
    """Serves until terminated."""
    infos = [describe(num_rows, num_blocks, num_host_blocks) for _ in range(num_executors)]
    await asyncio.gather(*(serve_info(scheduler, info, CostlyRunner()) for info in infos))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], *map(int, sys.argv[2:6])))
