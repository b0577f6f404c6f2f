from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve.scheduler.v1 import scheduler_pb2
from splitserve_cli.main import main
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes import fake_generation
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.fakes.scheduler_thread import FakeServer, words_of
from tests.support.processes.interrupts import children_take_sigint


def test_generate_streams_text_when_the_prompt_is_an_argument(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--address", server.address, "--seed=3", "--max-tokens=4", "t1 t2"]

    assert main(argv) == 0

    assert list(server.fake.requests[0].prompt_token_ids) == [1, 2, 9]
    assert capsys.readouterr().out == words_of(expected_tokens([1, 2, 9], 3, 4)) + "\n"


def test_generate_continues_the_prompt_when_it_is_raw(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--address", server.address, "--seed=3", "--max-tokens=2", "--raw", "t1"]

    assert main(argv) == 0

    assert list(server.fake.requests[0].prompt_token_ids) == [1]
    assert capsys.readouterr().out == f" {words_of(expected_tokens([1], 3, 2))}\n"


def test_generate_reads_prompt_from_file_when_told_so(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("t5")
    argv = ["generate", "--address", server.address, "--max-tokens=1", "--system=t4"]

    assert main([*argv, "--file", str(path)]) == 0

    assert list(server.fake.requests[0].prompt_token_ids) == [4, 5, 9]


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_generate_reads_prompt_from_stdin_when_there_is_no_other(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, prompt: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("t7"))

    assert main(["generate", "--address", server.address, "--max-tokens=1", *prompt]) == 0

    assert list(server.fake.requests[0].prompt_token_ids) == [7, 9]


def test_generate_sends_every_sampling_parameter_when_given(server: FakeServer) -> None:
    flags = (
        "--max-tokens=2 --min-tokens=1 --temperature=0.5 --top-k=3 --top-p=0.25 --min-p=0.125"
        " --repetition-penalty=1.5 --presence-penalty=-1 --frequency-penalty=0.75 --seed=-4"
        " --logprobs=2 --prompt-logprobs=1 --logit-bias=5=-1.5 --logit-bias=6=2 --ignore-eos"
        " --stop-token-id=8 --stop-token-id=9 --logit-bias=7=-inf --allowed-token-ids=5,6"
        " --bad-words=t3 --bad-words=t4"
    )

    assert main(["generate", "--address", server.address, *flags.split(), "t1"]) == 0

    params = server.fake.requests[0].sampling_params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k) == (
        2,
        1,
        0.5,
        3,
    )
    assert (params.top_p, params.min_p, params.repetition_penalty) == (0.25, 0.125, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (-1, 0.75, -4)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (2, 1)
    assert (dict(params.logit_bias), params.ignore_eos) == ({5: -1.5, 6: 2, 7: -math.inf}, True)
    assert list(params.allowed_token_ids) == [5, 6]
    assert [list(word.token_ids) for word in params.bad_words_token_ids] == [[3], [4]]
    assert list(params.stop_token_ids) == [8, 9]


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        (['--json-schema={"type": "object"}'], {"json_schema": '{"type": "object"}'}),
        (["--regex=[a-z]+"], {"regex": "[a-z]+"}),
        (["--lark", "start: /x/"], {"lark": "start: /x/"}),
        (["--choice=yes", "--choice=no"], {"choices": scheduler_pb2.Choices(texts=["yes", "no"])}),
    ],
)
def test_generate_sends_the_grammar_when_one_is_given(
    server: FakeServer, flags: list[str], sent: dict[str, Any]
) -> None:
    assert main(["generate", "--address", server.address, *flags, "t1"]) == 0
    assert server.fake.requests[0].sampling_params.grammar == scheduler_pb2.Grammar(**sent)


def test_generate_refuses_two_grammars(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--regex=x", "--choice=y")
    with pytest.raises(SystemExit):
        main(["generate", "--address", server.address, *flags, "t1"])
    assert "--regex" in capsys.readouterr().err
    assert server.fake.requests == []


def test_generate_leaves_defaults_to_the_server_when_nothing_is_given(server: FakeServer) -> None:
    assert main(["generate", "--address", server.address, "t1"]) == 0

    set_fields = [f.name for f, _ in server.fake.requests[0].sampling_params.ListFields()]
    assert set_fields == ["seed"]


RECOMMENDED: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", RECOMMENDED),
        ("--generation-config=model", RECOMMENDED),
        ("--generation-config=none", {}),
        ("--temperature=0 --top-p=1", {**RECOMMENDED, "temperature": 0, "top_p": 1}),
        ("--top-k=0", {**RECOMMENDED, "top_k": 0}),
        ("--generation-config=none --top-k=-1", {"top_k": -1}),
        ("--beam-width=2", {}),
    ],
)
def test_generate_uses_what_the_model_recommends_when_no_flag_says_otherwise(
    server: FakeServer, flags: str, expected: dict[str, float]
) -> None:
    server.fake.default_sampling_params = scheduler_pb2.SamplingParams(**RECOMMENDED)

    main(["generate", "--address", server.address, "--max-tokens=2", *flags.split(), "t1"])

    params = server.fake.requests[0].sampling_params
    found = {name: getattr(params, name) for name in RECOMMENDED if params.HasField(name)}
    assert found == expected


def test_generate_writes_one_object_when_json_is_asked_for(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--address", server.address, "--seed=1", "--max-tokens=3", "--logprobs=1"]

    assert main([*argv, "--json", "t1"]) == 0

    token_ids = expected_tokens([1, 9], 1, 3)
    content = json.loads(capsys.readouterr().out)
    assert [score.pop("token_id") for score in content.pop("logprobs")] == token_ids
    assert content == {
        "text": words_of(token_ids),
        "token_ids": token_ids,
        "finish_reason": "length",
        "usage": {
            "num_prompt_tokens": 2,
            "num_output_tokens": 3,
            "num_cached_tokens": 0,
            "num_preemptions": 0,
        },
    }


def test_generate_writes_json_lines_when_they_are_to_stream(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--address", server.address, "--seed=1", "--max-tokens=3", "--json"]

    assert main([*argv, "--stream", "t1"]) == 0

    *pieces, end = map(json.loads, capsys.readouterr().out.splitlines())
    token_ids = expected_tokens([1, 9], 1, 3)
    assert [token_id for piece in pieces for token_id in piece["token_ids"]] == token_ids
    assert "".join(piece["text"] for piece in pieces) == words_of(token_ids)
    assert end["finish_reason"] == "length"


def test_generate_ends_before_the_stop_string_when_it_appears(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    token_ids = expected_tokens([1, 9], 1, 8)
    stop = f"t{token_ids[2]}"
    argv = ["generate", "--address", server.address, "--seed=1", "--max-tokens=8", "--json"]

    assert main([*argv, "--stop", stop, "t1"]) == 0

    content = json.loads(capsys.readouterr().out)
    assert (content["finish_reason"], content["stop_string"]) == ("stop", stop)
    assert content["text"] == words_of(token_ids[:2]) + " "


@pytest.mark.parametrize(
    ("min_tokens", "kept"),
    [
        (2, 2),
        # The token whose text the stop string is in is the last of those.
        (3, 6),
        # The next token with that text comes after them.
        (5, 6),
        (6, 6),
        (7, 8),
    ],
)
def test_generate_looks_for_stop_strings_after_min_tokens_when_both_are_given(
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    min_tokens: int,
    kept: int,
) -> None:
    monkeypatch.setattr(fake_generation, "token_at", lambda *args: 10 + args[-1] % 4)
    argv = ["generate", "--address", server.address, "--max-tokens=8", "--json", "--stream"]

    assert main([*argv, f"--min-tokens={min_tokens}", "--stop=t12", "t1"]) == 0

    *pieces, end = map(json.loads, capsys.readouterr().out.splitlines())
    words = words_of([10, 11, 12, 13, 10, 11, 12, 13][:kept])
    # What ends the text comes after its last word and a space.
    assert "".join(piece["text"] for piece in pieces) == (words if kept == 8 else words + " ")
    assert ("stop_string" in end, end["finish_reason"]) == (
        (False, "length") if kept == 8 else (True, "stop")
    )
    assert end["usage"]["num_output_tokens"] >= min_tokens


def test_generate_ends_where_a_stop_string_ends_when_it_began_before_min_tokens(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_generation, "token_at", lambda *args: 10 + args[-1])
    argv = ["generate", "--address", server.address, "--max-tokens=8", "--json", "--stream"]

    assert main([*argv, "--min-tokens=3", "--stop=t11 t12 t13", "--stop=t12", "t1"]) == 0

    *pieces, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert "".join(piece["text"] for piece in pieces) == "t10 "
    assert (end["stop_string"], end["usage"]["num_output_tokens"]) == ("t11 t12 t13", 4)


def test_generate_is_one_line_and_1_when_the_server_refuses(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def before_request(request: object) -> None:
        raise DomainError("SAMPLING_PARAMS_INVALID", "top_p is 3; allowed: (0, 1]")

    server.fake.before_request = before_request

    assert main(["generate", "--address", server.address, "--top-p=3", "t1"]) == 1

    assert capsys.readouterr().err == (
        "splitserve generate: top_p is 3; allowed: (0, 1] [SAMPLING_PARAMS_INVALID]\n"
    )


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:1"])
@pytest.mark.parametrize("command", ["generate", "info"])
def test_command_is_one_line_and_1_when_no_server_answers(
    address: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["t1"] if command == "generate" else []

    assert main([command, "--address", address, *prompt]) == 1

    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith(f"splitserve {command}: no server answers at {address}")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "--stream", "x"], "--stream goes with --json"),
        (["generate", "--file=/nowhere", "x"], "give PROMPT or --file, not both"),
        (["generate", "--file=/nowhere"], "No such file"),
        (["generate", "--timeout=0", "x"], "is not above 0"),
        (["generate", "--max-tokens=99999999999", "x"], "invalid integer value"),
        (["generate", "--logit-bias=5", "x"], "invalid ID=X value"),
        (["generate", "--allowed-token-ids=", "x"], "invalid ID,ID,... value"),
        (["generate", "--allowed-token-ids=5,x", "x"], "invalid ID,ID,... value"),
        (["serve", "--block-size=0"], "0 is not allowed"),
    ],
)
def test_command_exits_with_2_when_arguments_are_bad(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_info_shows_model_and_pools_when_an_executor_is_there(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_ADDRESS", server.address)

    assert main(["info"]) == 0

    text = capsys.readouterr().out
    assert "model: fake (float32" in text
    heading, row = text.splitlines()[-3:-1]
    assert "FREE BLOCKS" in heading
    assert row.split("  ")[0] == "127.0.0.1:9"
    for cell in ("connected", "60 of 64", "17", "30 of 32"):
        assert cell in row


def test_info_shows_what_the_model_recommends_when_it_does(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.default_sampling_params = scheduler_pb2.SamplingParams(temperature=0.5, top_k=9)

    assert main(["info", "--address", server.address]) == 0
    assert "recommended for sampling: temperature 0.5, top_k 9\n" in capsys.readouterr().out

    assert main(["info", "--json", "--address", server.address]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["default_sampling_params"] == {"temperature": 0.5, "top_k": 9}


def test_info_writes_one_object_when_json_is_asked_for(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--json", "--address", server.address]) == 0

    content = json.loads(capsys.readouterr().out)
    assert content["model"]["name"] == "fake"
    (executor,) = content["executors"]
    assert (executor["connected"], executor["num_free_device_blocks"]) == (True, 60)
    assert (executor["num_swapped_requests"], executor["num_free_host_blocks"]) == (3, 30)
    assert executor["num_cached_device_blocks"] == 17


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "usage: splitserve"),
        (["genrate"], 2, "unknown command 'genrate'; did you mean 'generate'?"),
        (["x"], 2, "unknown command 'x'; see splitserve --help"),
    ],
)
def test_splitserve_explains_itself_when_the_command_is_unknown(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    assert message in capsys.readouterr().err


def test_splitserve_lists_commands_when_asked_for_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0

    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in ("serve", "generate", "info", "executor"))


def test_generate_aborts_and_exits_with_130_when_interrupted(server: FakeServer) -> None:
    def before_token(number: int) -> None:
        if number == 2:
            server.fake.hold = asyncio.Event()

    server.fake.before_token = before_token
    command = [
        sys.executable, "-m", "splitserve_cli", "generate", "--address", server.address,
        "--max-tokens=100", "t1",
    ]  # fmt: skip
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with children_take_sigint():
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
    with started as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b""

    server.run(asyncio.wait_for(server.fake.ended.wait(), 20))


def test_client_command_line_imports_no_grpc_when_it_only_gets_ready_to_serve() -> None:
    code = (
        "import sys, splitserve_cli.serve;"
        "print([n for n in ('grpc', 'tokenizers', 'jinja2', 'torch') if n in sys.modules])"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, check=True, text=True
    )

    assert done.stdout.strip() == "[]"
