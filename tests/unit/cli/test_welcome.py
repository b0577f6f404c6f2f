"""The commands that `splitserve serve` proposes work as written."""

from __future__ import annotations

import asyncio
import json
import shlex
import time

import pytest

from splitserve.scheduler.v1.scheduler_pb2 import PoolingInfo
from splitserve_cli.main import main
from splitserve_cli.serve_config import HttpTls, ServeConfig
from splitserve_cli.welcome import welcome
from tests.support.fakes.fake_scheduler import expected_tokens
from tests.support.fakes.running_schedulers import FakeServer


def _welcome(server: FakeServer, *, with_demo: bool) -> None:
    config = ServeConfig(server.address, None, "model", with_demo, 1.0, time.monotonic())
    asyncio.run(welcome(config))


def _proposed(text: str, command: str) -> list[str]:
    """The arguments of the one proposal that calls `command`."""
    [line] = [line for line in text.splitlines() if f" {command} " in line]
    words = shlex.split(line)
    return words[words.index(command) :]


CACERT = "curl: add --cacert FILE"
CLIENT_CERTIFICATE = "curl: add --cert FILE and --key FILE"
OPERATOR = "info: needs a key of the scope operator"


@pytest.mark.parametrize(
    ("http_tls", "needs_key", "remarks"),
    [
        (HttpTls.NONE, False, set()),
        (HttpTls.NONE, True, {OPERATOR}),
        (HttpTls.SERVER, True, {CACERT, OPERATOR}),
        (HttpTls.MUTUAL, False, {CACERT, CLIENT_CERTIFICATE}),
    ],
)
def test_welcome_says_what_else_its_commands_take(
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    http_tls: HttpTls,
    needs_key: bool,
    remarks: set[str],
) -> None:
    monkeypatch.delenv("SPLITSERVE_API_KEY", raising=False)
    http = "127.0.0.1:8443"
    config = ServeConfig(
        server.address, http, "model", False, 1.0, time.monotonic(), http_tls, needs_key
    )

    asyncio.run(welcome(config))

    shown = capsys.readouterr().out
    assert {text for text in (CACERT, CLIENT_CERTIFICATE, OPERATOR) if text in shown} == remarks


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("", "KV blocks of 16 tokens\n"),
        ("no compiler", "KV blocks of 16 tokens; slow: no compiler\n"),
    ],
)
def test_welcome_says_which_code_computes_and_whether_it_is_slow(
    server: FakeServer, capsys: pytest.CaptureFixture[str], reason: str, shown: str
) -> None:
    server.fake.slow_compute_reason = reason

    _welcome(server, with_demo=False)

    assert f": fake, float32, fake code, 64 {shown}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("operators", "flag"),
    [(None, ""), ("127.0.0.1:50050", ""), ("127.0.0.1:7", " --cluster-address 127.0.0.1:7")],
)
def test_welcome_says_where_operators_ask_when_that_is_elsewhere(
    server: FakeServer, capsys: pytest.CaptureFixture[str], operators: str | None, flag: str
) -> None:
    config = ServeConfig(
        server.address, None, "model", False, 1.0, time.monotonic(), operators=operators
    )

    asyncio.run(welcome(config))

    assert f" info --address {server.address}{flag}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({}, ""),
        (None, "the executors offer no tokenizer"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json is not readable"),
        ({"chat_template.jinja": b"{% for"}, "the model's chat template is invalid"),
    ],
)
@pytest.mark.parametrize("with_demo", [True, False])
def test_welcome_proposes_working_commands(
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, bytes] | None,
    why_not: str,
    with_demo: bool,
) -> None:
    has_tokenizer = not why_not
    server.fake.tokenizer_files |= changes or {}
    if changes is None:
        server.fake.tokenizer_files = {}

    _welcome(server, with_demo=with_demo)

    shown = capsys.readouterr()
    assert shown.err == ""
    assert (f"Prompts must be token ids: {why_not}" in shown.out) == (not has_tokenizer)
    assert len(server.fake.requests) == (with_demo and has_tokenizer)
    assert ("Tell me a story" in shown.out) == has_tokenizer
    for command in ("generate", "info"):
        assert main(_proposed(shown.out, command)) == 0
    assert capsys.readouterr().err == ""


def test_generate_takes_and_gives_token_ids_when_told_so(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.tokenizer_files = {}
    argv = ["generate", "--address", server.address, "--seed=3", "--max-tokens=4"]

    assert main([*argv, "--token-ids", "1,2 7"]) == 0
    assert main([*argv, "--token-ids=1", "--json"]) == 0

    assert [list(request.prompt_token_ids) for request in server.fake.requests] == [[1, 2, 7], [1]]
    text, content = capsys.readouterr().out.splitlines()
    assert text == " ".join(map(str, expected_tokens([1, 2, 7], 3, 4)))
    assert json.loads(content)["token_ids"] == expected_tokens([1], 3, 4)


def test_generate_names_the_remedy_without_a_tokenizer(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.tokenizer_files = {}

    assert main(["generate", "--address", server.address, "a text"]) == 1

    assert capsys.readouterr().err == (
        "splitserve generate: the executors offer no tokenizer; give token ids (--token-ids 1,2,3),"
        " or serve the model with its tokenizer.json [TOKENIZER_UNAVAILABLE]\n"
    )


@pytest.mark.parametrize(
    ("pooling", "path"),
    [
        (PoolingInfo(embedding_size=8), "/v1/embeddings"),
        (PoolingInfo(labels=["no", "yes"]), "/v1/classify"),
    ],
)
def test_welcome_of_a_model_of_vectors_shows_what_returns_them(
    server: FakeServer, capsys: pytest.CaptureFixture[str], pooling: PoolingInfo, path: str
) -> None:
    server.fake.pooling = pooling
    http = "127.0.0.1:8080"
    config = ServeConfig(server.address, http, "model", True, 1.0, time.monotonic())
    asyncio.run(welcome(config))
    shown = capsys.readouterr()
    assert f"curl http://{http}{path} " in shown.out
    assert '"sampling_params": {"pooling": {}}' in shown.out
    assert " generate " not in shown.out
    assert shown.err == ""
