"""A scheduler without a model, whose answers are in the prompts (`tests.clients.matrix.server`).

`python -m benchmarks.scripted_scheduler`: writes its address to the standard output, and serves
until the standard input ends.
"""

from __future__ import annotations

import asyncio
import sys

from tests.clients.matrix.server import TEMPLATE, ScriptedScheduler
from tests.support.fakes.fake_scheduler import start
from tests.support.models import tiny_tokenizers


async def main() -> None:
    """Serves until the standard input ends."""
    files = {
        "tokenizer.json": tiny_tokenizers.byte_level().to_str().encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    scheduler = await start(ScriptedScheduler(files))
    sys.stdout.write(f"127.0.0.1:{scheduler.port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
