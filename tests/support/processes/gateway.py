"""A gateway at a real port in this process, before a scheduler process with fake executors."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2

from splitserve_client import AsyncClient, Executor, Tokenizer, TokenizerUnavailable
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.server import Server
from splitserve_rpc import TlsFiles
from tests.contract.stranger.process import Scheduler, poll, running_scheduler
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.models import tiny_tokenizers
from tests.support.processes.addresses import reserve_address
from tests.support.processes.fake_service import (
    DIGEST,
    TIMEOUT_S,
    FakeService,
    StepWatch,
    fake_service,
)
from tests.support.processes.patience import PATIENCE_S, PATIENT_AT_CALLS

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def text_executor(
    folder: Path,
    chat_template: str = CHAT_TEMPLATE,
    added_tokens: Sequence[str] = (),
    **fields: Any,  # noqa: ANN401
) -> FakeExecutor:
    """A FakeExecutor with a byte-level tokenizer: its tokens are text, if odd text.

    `added_tokens`: further tokens, one for each text. Files are written to `folder`.
    """
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_tokens(list(added_tokens))
    config = {"chat_template": chat_template, "bos_token": "<s>", "eos_token": "</s>"}
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config),
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    fields = {"num_device_blocks": 1024, "max_model_len": 1024, **fields}
    return FakeExecutor(
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer_files={name: folder / name for name in files},
        **fields,
    )


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """Running gateway. `http`: client of it. `tokenizer`: that of the first executor."""

    url: str
    http: httpx2.AsyncClient
    service: FakeService
    tokenizer: Tokenizer
    server: Server
    client_tls: ssl.SSLContext | None = None

    async def post(self, path: str, **body: object) -> dict[str, Any]:
        """The answer to `body`, which must be a 200."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    async def stream(self, path: str, **body: object) -> list[dict[str, Any]]:
        """The events of a streamed answer up to [DONE], which must be the last line."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            text = (await response.aread()).decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].startswith("text/event-stream")
        *lines, last = [line for line in text.split("\n\n") if line and not line.startswith(":")]
        assert last == "data: [DONE]", text
        return [json.loads(line.partition("\nid: ")[0].removeprefix("data: ")) for line in lines]

    async def refusal(self, path: str, body: object, status: int = 400) -> dict[str, Any]:
        """The error object of the answer to `body`, which must have `status`."""
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a new connection."""
        config = self.server.config
        return await asyncio.open_connection(config.host, config.port, ssl=self.client_tls)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds`. Raises TimeoutError."""
        await until(holds)


async def until(holds: Callable[[], bool]) -> None:
    """Waits until `holds`. Raises TimeoutError."""

    async def look() -> tuple[bool, None]:
        return holds(), None

    await poll(look, PATIENCE_S)


WatchedGateway = tuple[RunningGateway, StepWatch]


def post_bytes(path: str, body: object, headers: str = "") -> bytes:
    """A request as it is on the wire; `headers`: more of them, each with its line end."""
    content = json.dumps(body).encode()
    headers += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n"
    return head.encode() + content


@asynccontextmanager
async def watched_gateway(
    folder: Path, config: GatewayConfig | None = None, **options: object
) -> AsyncIterator[WatchedGateway]:
    """A gateway before one executor, and the watch of its steps. Options as `running_gateway`."""
    watch = StepWatch()
    executor = text_executor(folder, fault=watch)
    async with running_gateway(executor, config=config, **options) as gateway:
        yield gateway, watch


@asynccontextmanager
async def held_gateway(
    folder: Path, config: GatewayConfig | None = None, after: int = 0, **options: object
) -> AsyncIterator[WatchedGateway]:
    """Runs a `watched_gateway` whose executor holds the step after the first `after` steps."""
    async with watched_gateway(folder, config, **options) as (gateway, watch):
        watch.hold(after=after)
        try:
            yield gateway, watch
        finally:
            watch.release()


@asynccontextmanager
async def running_gateway(
    *executors: FakeExecutor, config: GatewayConfig | None = None, **options: object
) -> AsyncIterator[RunningGateway]:
    """A gateway before a scheduler with `executors`. Options are the scheduler's flags.

    Where `config` has TLS, clients believe the authority that lies beside the certificate.
    """
    async with fake_service(*executors, **options) as service:
        config = replace(config or GatewayConfig(), schedulers=service.scheduler.address)
        client_tls = None if config.http_tls is None else trusting(config.http_tls)
        async with (
            serving(config) as server,
            httpx2.AsyncClient(
                base_url=url_of(server),
                timeout=PATIENCE_S,
                trust_env=False,
                verify=client_tls or True,
            ) as http,
        ):

            async def is_ready() -> tuple[bool, int]:
                status = (await http.get("/health/ready")).status_code
                return status == 200, status

            await poll(is_ready, PATIENCE_S)
            try:
                tokenizer = Tokenizer.from_files(_files(executors[0].tokenizer_files))
            except TokenizerUnavailable:
                tokenizer = Tokenizer(tiny_tokenizers.words(2))  # nobody asks it
            yield RunningGateway(url_of(server), http, service, tokenizer, server, client_tls)
            await service.wait_idle()


@asynccontextmanager
async def serving(config: GatewayConfig) -> AsyncIterator[Server]:
    """A gateway alone."""
    # Without the protocol asyncio does not know that it is TCP, and leaves Nagle's delay on.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        server = Server(config, f"127.0.0.1:{listener.getsockname()[1]}")
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield server
        finally:
            await server.exchanges.drain(5.0)
            server.should_exit = True
            await serving


def url_of(server: Server) -> str:
    """URL of a gateway."""
    scheme = "http" if server.http_tls is None else "https"
    return f"{scheme}://{server.config.host}:{server.config.port}"


def trusting(files: TlsFiles) -> ssl.SSLContext:
    """TLS context of a client that trusts the authority of these certificates."""
    assert files.cert is not None, "a server has one"
    return ssl.create_default_context(cafile=files.cert.parent / "ca.crt")


def _files(paths: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in paths.items()}


@dataclass
class MortalScheduler:
    """A scheduler, whose lives are all at one address, and its executor, which outlives them."""

    executor: FakeExecutor
    watch: StepWatch
    address: str
    lives: AsyncExitStack
    options: dict[str, object]
    scheduler: Scheduler

    async def start(self) -> None:
        """Begins another life, and waits until the executor is there."""
        self.scheduler = await _begin(self.lives, self.address, self.options)
        await self.wait_executor()

    async def kill(self) -> None:
        """Ends its life as SIGKILL does."""
        self.scheduler.process.kill()
        await self.wait_gone()

    async def wait_gone(self) -> None:
        """Waits until the process has ended."""
        await asyncio.to_thread(self.scheduler.process.wait)

    async def wait_executor(self) -> None:
        """Waits until the executor is connected."""

        async def ask() -> tuple[bool, object]:
            executors = await self._executors()
            return any(e.is_connected for e in executors), executors

        await poll(ask, TIMEOUT_S)

    async def wait_requests(self, num_requests: int) -> None:
        """Waits until exactly this number of requests runs or waits."""

        async def ask() -> tuple[bool, object]:
            executors = await self._executors()
            nums = [e.num_running_requests + e.num_waiting_requests for e in executors]
            return sum(nums) == num_requests, executors

        await poll(ask, TIMEOUT_S)

    async def _executors(self) -> tuple[Executor, ...]:
        async with AsyncClient(self.address, PATIENT_AT_CALLS) as client:
            return tuple((await client.list_executors()).executors)


@asynccontextmanager
async def mortal_scheduler(
    folder: Path, address: str | None = None, *, model_name: str = "fake", **options: object
) -> AsyncIterator[MortalScheduler]:
    """A scheduler at `address`, whose flags `options` are; its executor's tokens are text."""
    address, watch = address or reserve_address(), StepWatch()
    options = {"reconnect_timeout_s": 0.1, **options}
    async with AsyncExitStack() as lives:
        scheduler = await _begin(lives, address, options)
        executor = text_executor(folder, fault=watch, model_name=model_name, digest=DIGEST)
        executor.scheduler_address = address
        await lives.enter_async_context(executor)
        lives.callback(watch.release)
        running = MortalScheduler(executor, watch, address, lives, options, scheduler)
        await running.wait_executor()
        yield running


async def _begin(lives: AsyncExitStack, address: str, options: dict[str, object]) -> Scheduler:
    return await lives.enter_async_context(running_scheduler(listen=address, **options))
