"""The client of `benchmarks.step_cost`: reads how many requests of how many tokens to send."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator

from benchmarks.serving import wait_until_connected
from splitserve_client import AsyncClient, Finish, SamplingParams, SchedulingParams, Tokens

_PROMPT_TOKENS = 32


async def main(address: str) -> None:
    """Says that it is ready, and after each line on standard input how many steps there were."""
    await wait_until_connected(address)
    loop = asyncio.get_running_loop()
    async with AsyncClient(address) as client, client.session() as session:
        _say("ready")
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            num_rows, num_tokens = map(int, line.split())
            before = (await client.list_executors()).executors[0].num_steps
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            # Each run is to compute the same.
            scheduling = SchedulingParams(bypass_prefix_cache=True)
            requests = [
                session.submit(prompt, params, scheduling=scheduling)
                for prompt in _prompts(num_rows)
            ]
            await asyncio.gather(*map(_read, requests))
            after = (await client.list_executors()).executors[0].num_steps
            _say(str(after - before))


def _prompts(num_rows: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 1000) for _ in range(_PROMPT_TOKENS)] for _ in range(num_rows)]


async def _read(request: AsyncIterator[Tokens | Finish]) -> None:
    async for _ in request:
        pass


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
