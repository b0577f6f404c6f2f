"""Output of `splitserve serve` once it serves: a first completion, and example calls."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from contextlib import aclosing, suppress
from http import HTTPStatus
from http.client import HTTPException

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve_cli.command_line import API_KEY_ENV, as_seen_by_people, environment_key
from splitserve_cli.serve_config import HttpTls, ServeConfig
from splitserve_client import DEFAULT_ADDRESS, AsyncClient, ClientConfig, Pooling, stream_text
from splitserve_common import local_http
from splitserve_options import DEFAULT_CLUSTER_ADDRESS
from splitserve_text import (
    ChatTemplateFailed,
    Piece,
    Prompt,
    SamplingParams,
    SplitserveError,
    Tokenizer,
    TokenizerUnavailable,
)

_DEMO_PROMPT = "Tell me a story about a fox."
_DEMO_PARAMS = SamplingParams(temperature=0.7, max_tokens=256)
_POLL_S = 0.05
_HTTP_TIMEOUT_S = 5.0


async def wait_until_serving(config: ServeConfig) -> None:
    """Waits without limit until the server takes requests."""
    await _wait_for_scheduler(config.address)
    http = config.http
    while http is not None:
        if await asyncio.to_thread(_is_ready, http, config.http_tls):
            return
        await asyncio.sleep(_POLL_S)


def _is_ready(http: str, tls: HttpTls) -> bool:
    connection = local_http(http, _HTTP_TIMEOUT_S, is_tls=tls is not HttpTls.NONE)
    try:
        if tls is HttpTls.MUTUAL:
            # It answers only clients with a certificate.
            connection.connect()
            return True
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


async def _wait_for_scheduler(address: str) -> None:
    options = [
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 200),
        ("grpc.enable_http_proxy", 0),
    ]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        # Polled rather than watched: an open call while the server stops sometimes makes it log a
        # traceback.
        while True:
            with suppress(grpc.aio.AioRpcError):
                response = await stub.Check(health_pb2.HealthCheckRequest())
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_POLL_S)


async def welcome(config: ServeConfig) -> None:
    """Reports that the server is ready, streams a first completion, and shows example calls."""
    has_tokenizer, pooling, key = True, None, environment_key()
    if config.needs_key and key is None:
        _say_ready(config, "; callers need keys")
        _write(_how_to_call(config, has_tokenizer=True))
        return
    try:
        as_caller = ClientConfig(api_key=key)
        async with AsyncClient(config.address, as_caller) as client:
            _say_ready(config, await _served(client))
            tokenizer = await _tokenizer(client)
            has_tokenizer = tokenizer is not None
            pooling = (await client.get_model()).pooling
            if tokenizer is not None and pooling is None and config.with_demo:
                await _demo(client, tokenizer)
    except SplitserveError as error:
        # The server keeps running; a failed first completion is reported in one line.
        failed = "first completion" if config.with_demo else "query of the model"
        sys.stderr.write(f"splitserve serve: {failed} failed: {error}\n")
    if pooling is None:
        _write(_how_to_call(config, has_tokenizer=has_tokenizer))
    else:
        _write(_how_to_get_vectors(config, pooling, has_tokenizer=has_tokenizer))


def _say_ready(config: ServeConfig, details: str) -> None:
    elapsed_s = time.monotonic() - config.started_at
    _write(f"splitserve is ready at {config.address} after {elapsed_s:.1f} s{details}\n")


async def _served(client: AsyncClient) -> str:
    """Returns a description of the served model, as far as the credential permits."""
    # Executors are visible to operators only, perhaps at another address.
    with suppress(SplitserveError, IndexError):
        executor = (await client.list_executors()).executors[0]
        compute = [executor.compute] if executor.compute else []  # not all executors report it
        blocks = f"{executor.num_device_blocks} KV blocks of {executor.block_size} tokens"
        slow = f"; slow: {executor.slow_compute_reason}" if executor.slow_compute_reason else ""
        return f": {', '.join([executor.model_name, executor.dtype, *compute, blocks])}{slow}"
    with suppress(SplitserveError):
        model = await client.get_model()
        return f": {model.name}, {model.dtype}"
    return ""


async def _tokenizer(client: AsyncClient) -> Tokenizer | None:
    """Returns the tokenizer; None, with a line that says why, if prompts have to be token ids."""
    try:
        return await client.get_tokenizer()
    except (TokenizerUnavailable, ChatTemplateFailed) as error:
        _write(f"Prompts must be token ids: {' '.join(str(error).split())}\n")
        return None


async def _demo(client: AsyncClient, tokenizer: Tokenizer) -> None:
    _write(f"\n> {_DEMO_PROMPT}\n")
    events = stream_text(client, tokenizer, Prompt(_DEMO_PROMPT), _DEMO_PARAMS)
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Piece):
                    _write(event.text)
    finally:
        _write("\n")


def _how_to_call(config: ServeConfig, *, has_tokenizer: bool) -> str:
    prompt = '"Tell me a story about a dragon."' if has_tokenizer else "--token-ids 1,2,3"
    body = '{"prompt": "Tell me a story about a dragon.", "max_tokens": 40, "seed": 1}'
    curl = _curl(config, "completions", body) if has_tokenizer else ""
    generate = f"  {_program()} generate{_where(config)} {prompt}\n"
    return _calls(config, curl, generate, '{"max_tokens": 8}')


def _how_to_get_vectors(config: ServeConfig, pooling: Pooling, *, has_tokenizer: bool) -> str:
    path = "embeddings" if pooling.embedding_size else "classify"
    body = '{"input": "A story about a dragon."}'
    curl = _curl(config, path, body) if has_tokenizer else ""
    return _calls(config, curl, "", '{"pooling": {}}')


def _calls(config: ServeConfig, curl: str, generate: str, sampling_params: str) -> str:
    """Returns the example calls; `generate`: the line of that command, or nothing."""
    is_elsewhere = config.operators not in (None, DEFAULT_CLUSTER_ADDRESS)
    operators = f" --cluster-address {config.operators}" if is_elsewhere else ""
    body = f'{{"prompt_token_ids": [1, 2, 3], "sampling_params": {sampling_params}}}'
    setting = f"  export {API_KEY_ENV}=...\n" if config.needs_key else ""
    bearer = f' -H "authorization: Bearer ${API_KEY_ENV}"' if config.needs_key else ""
    return f"""
From another terminal:
{setting}{curl}{generate}  {_program()} info{_where(config)}{operators}
  grpcurl -plaintext{bearer} -d '{body}' \\
    {config.address} splitserve.scheduler.v1.SchedulerService/Generate
{_hints(config, shows_curl=bool(curl))}Ctrl-C stops the server.
"""


def _where(config: ServeConfig) -> str:
    return "" if config.address == DEFAULT_ADDRESS else f" --address {config.address}"


def _curl(config: ServeConfig, path: str, body: str) -> str:
    """Returns a call of /v1/`path`; nothing without a gateway."""
    if config.http is None:
        return ""
    url = f"{'http' if config.http_tls is HttpTls.NONE else 'https'}://{config.http}"
    headers = "-H 'content-type: application/json'"
    if config.needs_key:
        headers = f'{headers} -H "authorization: Bearer ${API_KEY_ENV}"'
    return f"  curl {url}/v1/{path} {headers} \\\n    -d '{body}'\n"


def _hints(config: ServeConfig, *, shows_curl: bool) -> str:
    # Separate lines, as some shells take a comment after a command for an argument.
    lines = []
    if config.live is not None:
        scheme = "http" if config.http_tls is HttpTls.NONE else "https"
        lines.append(f"The live page is at {scheme}://{config.live}/")
    if shows_curl and config.http_tls is not HttpTls.NONE:
        lines.append("curl: add --cacert FILE if a private authority signed the certificate.")
    if shows_curl and config.http_tls is HttpTls.MUTUAL:
        lines.append("curl: add --cert FILE and --key FILE: HTTP clients need a certificate.")
    if config.needs_key:
        lines.append(
            "info: needs a key of the scope operator (splitserve keys add --scope operator)."
        )
    return "".join(f"{line}\n" for line in lines)


def _program() -> str:
    """Returns the name under which this command can be called again."""
    program = sys.argv[0]
    if os.path.basename(program) == "splitserve":
        return "splitserve" if shutil.which("splitserve") else os.path.relpath(program)
    return "python -m splitserve_cli"


def _write(text: str) -> None:
    file = as_seen_by_people(sys.stdout)
    file.write(text)
    file.flush()
