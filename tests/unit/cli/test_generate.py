"""`splitserve generate`: prompts, and what is sent with them."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

from splitserve.scheduler.v1 import scheduler_pb2
from splitserve_cli.main import main
from splitserve_rpc.domain_error import DomainError
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.fakes.fake_scheduler import RECOMMENDED
from tests.support.fakes.scheduler_thread import FakeServer, words_of


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
