"""Whose turn it is: a tenant with little to do does not wait for one with much.

For a scheduler with `--queue-policy fair`; another one takes no account of tenants.
"""

import asyncio
import sys

from splitserve_client import AsyncClient, SamplingParams, SchedulingParams


async def serve_two(address: str) -> None:
    """Prints who was served, in that order."""
    params = SamplingParams(max_tokens=8)
    async with AsyncClient(address) as client:

        async def ask(tenant: str) -> None:
            await client.complete_text(
                f"A word from {tenant}:", params, scheduling=SchedulingParams(tenant=tenant)
            )
            print(tenant)

        async with asyncio.TaskGroup() as group:
            for tenant in ["busy"] * 12 + ["quiet"]:
                group.create_task(ask(tenant))


def main(address: str) -> None:
    """Runs it."""
    asyncio.run(serve_two(address))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
