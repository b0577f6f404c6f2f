"""Targets from their addresses, and the target that is a splitserve scheduler over gRPC."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from splitserve_bench.targets.target import (
    AnswerSummary,
    AskFailed,
    AskOptions,
    Part,
    Target,
    TargetAddress,
    Tokens,
)
from splitserve_bench.workloads import PromptTokens, Turn
from splitserve_client import (
    ApiKey,
    AsyncClient,
    ClientConfig,
    Finish,
    RetryPolicy,
    SamplingParams,
    Session,
    SplitserveError,
)
from splitserve_rpc import TlsFiles, load_files

# Refused and lost requests are counted, not hidden by a retry.
_NO_RETRY = RetryPolicy(give_up_after_s=0.0)
_CONNECT_TIMEOUT_S = 10.0


class TargetRefused(ValueError):
    """Unusable address of a target; the message gives the allowed forms."""


def parse_target(text: str) -> TargetAddress:
    """Parses `[NAME=]URL`, with the URL http(s)://host[:port][/path] or [grpc://]host:port.

    Raises TargetRefused.
    """
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = "", text
    if "://" not in url:
        url = f"grpc://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("grpc", "http", "https") or not parts.netloc:
        raise TargetRefused(
            f"{url!r} is not a target; allowed: grpc://HOST:PORT, http://HOST:PORT/v1, https://..."
        )
    if "@" in parts.netloc:
        raise TargetRefused(
            "a user or password in a URL is visible to all users of this machine (ps)"
        )
    return TargetAddress(name or parts.netloc, url)


def open_target(address: TargetAddress, options: AskOptions) -> Target:
    """Creates the target of an address, without connecting.

    Raises TargetRefused, SplitserveError, FilesUnusable.
    """
    if address.url.startswith("grpc://"):
        config = ClientConfig(
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            retry=_NO_RETRY,
            tls=address.tls,
            api_key=address.api_key,
            api_key_file=address.api_key_file,
        )
        return SchedulerTarget(address.url.removeprefix("grpc://"), config, options)
    return _open_http(address, options)


def _open_http(address: TargetAddress, options: AskOptions) -> Target:
    try:
        import httpx2
    except ImportError as error:
        raise TargetRefused(
            "targets over HTTP need the package httpx2: pip install 'splitserve[bench]'"
        ) from error
    from splitserve_bench.targets.openai_target import OpenAiTarget

    client = httpx2.AsyncClient(
        base_url=address.url.rstrip("/") + "/",
        headers=_headers(address),
        timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        verify=_tls_context(address.tls),
        # A proxy would distort the measurement.
        trust_env=False,
    )
    return OpenAiTarget(client, options)


def _headers(address: TargetAddress) -> Mapping[str, str]:
    """Returns the headers of all requests. Raises CredentialsUnusable."""
    key = ApiKey(address.api_key, address.api_key_file)
    # Compressed answers arrive in larger pieces.
    return {"accept-encoding": "identity", **dict(key.current())}


def _tls_context(files: TlsFiles | None) -> ssl.SSLContext | bool:
    """Returns the TLS context of a target; True for the default. Raises FilesUnusable."""
    if files is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_files(context, files)
    if files.ca is None:
        context.load_default_certs()
    return context


# -- Scheduler as a target, by token ids over one gRPC session -------------------------------------


class SchedulerTarget:
    """Scheduler as a target. `config` should have no retries, so that refusals are counted."""

    def __init__(self, address: str, config: ClientConfig, options: AskOptions) -> None:
        self._client = AsyncClient(address, config)
        self._session: Session = self._client.session()
        self._options = options
        # Conversations of a round share the cached tokens of pieces.
        self._tokens_of = lru_cache(maxsize=2)(
            lambda salt: PromptTokens(salt, *options.token_range)
        )

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.__aexit__(kind, error, traceback)
        await self._client.close()

    async def get_ready(self) -> str:
        try:
            model = await self._client.get_model()
        except SplitserveError as error:
            raise _failed(error) from error
        if model.vocab_size < self._options.token_range[1]:
            low, high = self._options.token_range
            raise AskFailed(
                "token_range",
                f"--token-range is {low}:{high}; allowed: up to {model.vocab_size} (vocabulary of"
                f" {model.name})",
            )
        return model.name

    def begin(self, salt: int) -> _Dialog:
        return _Dialog(self._session, self._options, self._tokens_of(salt))


class _Dialog:
    """Dialog whose prompt includes the earlier answers as received."""

    def __init__(self, session: Session, options: AskOptions, tokens: PromptTokens) -> None:
        self._session = session
        self._options = options
        self._tokens = tokens
        self._token_ids: list[int] = []

    def prepare(self, turn: Turn) -> _Exchange:
        self._token_ids += self._tokens.of(turn.pieces)
        params = SamplingParams(
            temperature=self._options.temperature,
            max_tokens=turn.num_output_tokens,
            ignore_eos=self._options.ignores_eos,
        )
        return _Exchange(self._session, tuple(self._token_ids), params, self._token_ids)


class _Exchange:
    def __init__(
        self,
        session: Session,
        prompt: tuple[int, ...],
        params: SamplingParams,
        history: list[int],
    ) -> None:
        self._session = session
        self._prompt = prompt
        self._params = params
        self._history = history

    async def send(self) -> AsyncGenerator[Part, None]:
        request = self._session.submit(self._prompt, self._params)
        try:
            async for event in request:
                if isinstance(event, Finish):
                    usage = event.usage
                    yield AnswerSummary(
                        usage.num_prompt_tokens,
                        usage.num_output_tokens,
                        usage.num_cached_tokens,
                        usage.num_preemptions,
                    )
                elif event.token_ids:
                    self._history += event.token_ids
                    yield Tokens(len(event.token_ids))
        except SplitserveError as error:
            raise _failed(error) from error
        finally:
            request.close()


def _failed(error: SplitserveError) -> AskFailed:
    return AskFailed(error.reason or type(error).__name__, error.message)
