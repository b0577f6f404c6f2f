"""`splitserve generate`: prompts, sent parameters and output."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from splitserve.scheduler.v1 import scheduler_pb2
from splitserve_cli.generate import SeveralTextsOutput
from splitserve_cli.main import main
from splitserve_client import End, FinishReason, Piece, SequenceFinish, Usage
from splitserve_contract import DomainError
from tests.support.fakes.fake_scheduler import RECOMMENDED, expected_tokens, logprob_of
from tests.support.fakes.running_schedulers import FakeServer, words_of


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


def test_generate_sends_every_parameter_when_given(server: FakeServer) -> None:
    flags = (
        "--max-tokens=2 --min-tokens=1 --temperature=0.5 --top-k=3 --top-p=0.25 --min-p=0.125"
        " --repetition-penalty=1.5 --presence-penalty=-1 --frequency-penalty=0.75 --seed=-4"
        " --logprobs=2 --prompt-logprobs=1 --logit-bias=5=-1.5 --logit-bias=6=2 --ignore-eos"
        " --stop-token-id=8 --stop-token-id=9 --logit-bias=7=-inf --allowed-token-ids=5,6"
        " --bad-words=t3 --bad-words=t4 --n=2 --beam-width=4 --length-penalty=-1.5"
        " --early-stopping=always --priority=-7 --tenant=me --deadline-s=2.5 --adapter=poet"
        " --cache-salt=pepper --bypass-prefix-cache --target-itl-ms=40 --num-public-prefix-tokens=3"
    )

    assert main(["generate", "--address", server.address, *flags.split(), "t1"]) == 0

    (sent,) = server.fake.requests
    assert sent.sampling_params == scheduler_pb2.SamplingParams(
        max_tokens=2,
        min_tokens=1,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.75,
        seed=-4,
        num_logprobs=2,
        num_prompt_logprobs=1,
        logit_bias={5: -1.5, 6: 2, 7: -math.inf},
        ignore_eos=True,
        stop_token_ids=[8, 9],
        allowed_token_ids=[5, 6],
        bad_words_token_ids=[scheduler_pb2.TokenSequence(token_ids=[word]) for word in (3, 4)],
        n=2,
        beam_search=scheduler_pb2.BeamSearch(
            width=4, length_penalty=-1.5, early_stopping=scheduler_pb2.BEAM_EARLY_STOPPING_ALWAYS
        ),
    )
    assert (sent.priority, sent.tenant, sent.adapter) == (-7, "me", "poet")
    assert (sent.cache_salt, sent.bypass_prefix_cache) == ("pepper", True)
    assert (sent.num_public_prefix_tokens, sent.target_itl_ms) == (3, 40)
    assert sent.deadline.ToTimedelta().total_seconds() == 2.5


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
def test_generate_uses_the_recommended_parameters_by_default(
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
    assert [piece.get("finish_reason") for piece in pieces][-2:] == [None, "length"]
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


SENT = [1, 9]  # the prompt t1 in its template
SEED = 3


def run(server: FakeServer, flags: str) -> int:
    argv = ["generate", "--address", server.address, f"--seed={SEED}", *flags.split(), "t1"]
    return main(argv)


def tokens(max_tokens: int, index: int) -> list[int]:
    return expected_tokens(SENT, SEED, max_tokens, index)


def test_generate_writes_texts_in_order_when_n_is_2(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "--n=2 --max-tokens=3") == 0

    first, second = (words_of(tokens(3, index)) for index in range(2))
    assert capsys.readouterr().out == (f"--- 1 of 2 ---\n{first}\n\n--- 2 of 2 ---\n{second}\n")


def test_generate_writes_a_list_when_json_has_several_completions(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = tokens(2, 1)[1]

    assert run(server, f"--n=2 --max-tokens=3 --json --stop-token-id={stop}") == 0

    content = json.loads(capsys.readouterr().out)
    assert content.pop("usage")["num_output_tokens"] == 5
    assert content == {
        "completions": [
            {
                "index": 0,
                "text": words_of(tokens(3, 0)),
                "token_ids": tokens(3, 0),
                "finish_reason": "length",
            },
            {
                "index": 1,
                "text": words_of(tokens(2, 1)),
                "token_ids": tokens(2, 1),
                "finish_reason": "stop",
            },
        ],
        "finish_reason": "length",
    }


def test_generate_streams_json_lines_with_indexes(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "--n=2 --max-tokens=3 --json --stream") == 0

    *pieces, end = map(json.loads, capsys.readouterr().out.splitlines())
    for index in range(2):
        own = [piece for piece in pieces if piece["index"] == index]
        assert [t for piece in own for t in piece["token_ids"]] == tokens(3, index)
        assert [piece.get("finish_reason") for piece in own][-2:] == [None, "length"]
    assert end["usage"]["num_output_tokens"] == 6


@pytest.mark.parametrize("flags", ["--beam-width=3", "--beam-width=3 --n=2"])
def test_generate_writes_scores_when_beams_are_searched(
    server: FakeServer, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    assert run(server, f"{flags} --max-tokens=4 --length-penalty=0.5 --json") == 0

    content = json.loads(capsys.readouterr().out)
    best = content["completions"][0] if "n=2" in flags else content
    total = sum(map(logprob_of, best["token_ids"]))
    assert best["cumulative_logprob"] == pytest.approx(total)
    assert best["score"] == pytest.approx(total / 2)


def test_texts_stream_in_order_when_ending_out_of_order() -> None:
    file = io.StringIO()
    output = SeveralTextsOutput(file, 3)
    finish = SequenceFinish(0, FinishReason.STOP, 1, 1)

    output.piece(Piece("b", index=1))
    output.piece(Piece("a", index=0))
    assert file.getvalue() == "--- 1 of 3 ---\na"
    output.piece(Piece("B", index=1, finish=finish))
    output.piece(Piece("A", index=0, finish=finish))
    assert file.getvalue() == "--- 1 of 3 ---\naA\n\n--- 2 of 3 ---\nbB\n\n--- 3 of 3 ---\n"
    output.piece(Piece("c", index=2))
    output.end(End(FinishReason.ABORTED, Usage(1, 5, 0, 0)))

    assert file.getvalue().endswith("--- 3 of 3 ---\nc\n")
