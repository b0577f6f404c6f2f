"""Gateway whose model says what the user asks for: `python -m tests.clients.matrix.server`.

Writes its URL to the standard output, and runs until the standard input ends.

The last user message has the answers between `[[[` and `]]]`, separated by `|||`: the first answers
that message, the next ones the results of tools. `{result}` in an answer is the last result,
`{aborted}` the number of aborted requests. An answer that ends with `{hold}` does not end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from scheduler_service.scheduler.engine.planning import check_prompt_length
from scheduler_service.scheduler.values import SchedulerConfig
from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_client import Tokenizer
from splitserve_gateway.config import GatewayConfig
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_scheduler import FakeScheduler, start
from tests.support.models import tiny_tokenizers
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S

EOS = 1
CONFIG = SchedulerConfig(
    block_size=16,
    num_device_blocks=4096,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    max_model_len=16384,
    max_num_waiting=8,
    vocab_size=1000,
    eos_token_ids=frozenset({EOS}),
)
HOLD = "{hold}"
# Calls and reasons as models of the Hermes kind do. Instructions of agents have many pages.
TEMPLATE = (
    "{% for message in messages if message['role'] != 'system' %}"
    "\x01{{ message['role'] }}\x02{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function']['name'] }}"
    "{{ call['function']['arguments'] | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}\x01assistant\x02{% endif %}"
)
NOT_ASKED = "Nothing was asked."


class ScriptedScheduler(FakeScheduler):
    """Answers every request as its prompt asks; made for one request at a time."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(
            before_request=self._script,
            before_token=self._hold_at_the_end,
            before_abort=self._count_aborted,
            tokenizer_files=files,
            max_model_len=CONFIG.max_model_len,
        )
        self._tokenizer = Tokenizer.from_files(files)
        self._num_aborted = 0
        self._held_token: int | None = None

    def _script(self, request: api.GenerateRequest) -> None:
        token_ids = list(request.prompt_token_ids)
        check_prompt_length(len(token_ids), CONFIG)
        if not request.sampling_params.HasField("max_tokens"):
            request.sampling_params.max_tokens = CONFIG.max_model_len - len(token_ids)
        prompt = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        said = answer(prompt).replace("{aborted}", str(self._num_aborted))
        output = [*self._tokenizer.encode(said, add_special_tokens=False), EOS]
        self.outputs[:] = [output]
        self._held_token = self.num_tokens + len(output) - 1 if said.endswith(HOLD) else None

    def _hold_at_the_end(self, number: int) -> None:
        self.hold = asyncio.Event() if number == self._held_token else None

    def _count_aborted(self) -> None:
        self._num_aborted += 1


def answer(prompt: str) -> str:
    """What the model says after `prompt`."""
    if "\x01" not in prompt:
        prompt = f"\x01user\x02{prompt}\x01assistant\x02"  # of a completion
    turns = [turn.split("\x02", 1) for turn in prompt.split("\x01")[1:]]
    asked = [index for index, (role, text) in enumerate(turns) if role == "user" and "[[[" in text]
    if not asked:
        return NOT_ASKED
    script = turns[asked[-1]][1].rpartition("[[[")[2].partition("]]]")[0]
    after = [role for role, _ in turns[asked[-1] : -1]]
    results = [text for role, text in turns[asked[-1] :] if role == "tool"]
    answers = script.split("|||")
    said = answers[min(after.count("assistant"), len(answers) - 1)]
    return said.replace("{result}", results[-1] if results else "")


@asynccontextmanager
async def scripted_gateway() -> AsyncIterator[str]:
    """A running gateway; its URL."""
    files = {
        "tokenizer.json": tiny_tokenizers.byte_level().to_str().encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    scheduler = await start(ScriptedScheduler(files))
    try:
        async with (
            serving(GatewayConfig(schedulers=f"127.0.0.1:{scheduler.port}")) as server,
            httpx2.AsyncClient(base_url=url_of(server), trust_env=False) as http,
        ):

            async def is_ready() -> tuple[bool, object]:
                response = await http.get("/health/ready")
                return response.status_code == 200, response.text

            await poll(is_ready, PATIENCE_S)
            yield url_of(server)
    finally:
        await scheduler.server.stop(None)


async def main() -> None:
    """Serves until the standard input ends."""
    async with scripted_gateway() as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
