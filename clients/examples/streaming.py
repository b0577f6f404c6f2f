"""Streams text with asyncio. A reader that stops aborts the request."""

import asyncio
import sys
from contextlib import aclosing

from splitserve_client import AsyncClient, End, SamplingParams


async def stream(address: str) -> None:
    """Prints pieces as they arrive."""
    params = SamplingParams(max_tokens=20, temperature=0)
    async with AsyncClient(address) as client:
        events = client.stream_text("Once upon a time", params, stop_strings=["\n\n"])
        async with aclosing(events):
            async for event in events:
                if isinstance(event, End):
                    print(f"\n[{event.reason.value}]")
                else:
                    print(event.text, end="", flush=True)


def main(address: str) -> None:
    """Runs `stream`."""
    asyncio.run(stream(address))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
