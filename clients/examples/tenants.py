"""Fair queueing: a tenant with few requests does not wait for a tenant with many.

Needs a scheduler with `--queue-policy fair`; other policies ignore tenants.
"""

import asyncio
import sys

from splitserve_client import AsyncClient, SamplingParams, SchedulingParams


async def serve_two(address: str) -> None:
    """Prints the tenant of each completion, in the order of completion."""
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
    """Runs `serve_two`."""
    asyncio.run(serve_two(address))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
