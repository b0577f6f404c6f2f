"""`splitserve generate`: what it writes, and where that ends."""

from __future__ import annotations

import json

import pytest

from splitserve_cli.main import main
from tests.support.fakes import fake_generation
from tests.support.fakes.fake_generation import expected_tokens
from tests.support.fakes.scheduler_thread import FakeServer, words_of


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
