"""A fake scheduler for tests that have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from splitserve_rpc.server import OPEN, ServerSecurity
from tests.support.fakes.fake_generation import VOCAB_SIZE
from tests.support.fakes.fake_scheduler import FakeScheduler, start
from tests.support.models import tiny_tokenizers
from tests.support.processes.patience import PATIENCE_S

T = TypeVar("T")
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}t9"


class FakeServer:
    """A fake scheduler with an event loop in a thread: commands run loops of their own."""

    def __init__(self, security: ServerSecurity = OPEN) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        files = {
            "tokenizer.json": tiny_tokenizers.words(VOCAB_SIZE).to_str().encode(),
            "chat_template.jinja": TEMPLATE.encode(),
        }
        self.fake = self.run(self._make(files))
        self.running = self.run(start(self.fake, security=security))
        self.address = f"127.0.0.1:{self.running.port}"

    async def _make(self, files: dict[str, bytes]) -> FakeScheduler:
        return FakeScheduler(tokenizer_files=files)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        self.run(self.running.server.stop(None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def words_of(token_ids: list[int]) -> str:
    return " ".join(f"t{token_id}" for token_id in token_ids)
