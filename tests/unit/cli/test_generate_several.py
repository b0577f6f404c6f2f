"""`splitserve generate` with several completions, and with scheduling parameters."""

from __future__ import annotations

import io
import json

import pytest

from splitserve_cli.generate import SeveralTextsOutput
from splitserve_cli.main import main
from splitserve_client import End, FinishReason, Piece, SequenceFinish, Usage
from tests.support.fakes.fake_generation import expected_tokens, logprob_of
from tests.support.fakes.scheduler_thread import FakeServer, words_of

SENT = [1, 9]  # the prompt t1 in its template
SEED = 3


def run(server: FakeServer, flags: str) -> int:
    argv = ["generate", "--address", server.address, f"--seed={SEED}", *flags.split(), "t1"]
    return main(argv)


def tokens(max_tokens: int, index: int) -> list[int]:
    return expected_tokens(SENT, SEED, max_tokens, index)


def test_generate_writes_one_text_after_the_other_when_n_is_2(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "--n=2 --max-tokens=3") == 0

    first, second = (words_of(tokens(3, index)) for index in range(2))
    assert capsys.readouterr().out == (f"--- 1 of 2 ---\n{first}\n\n--- 2 of 2 ---\n{second}\n")


def test_generate_writes_plain_text_when_one_of_many_is_returned(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "--best-of=3 --max-tokens=3") == 0

    best = max((tokens(3, index) for index in range(3)), key=lambda t: sum(map(logprob_of, t)))
    assert capsys.readouterr().out == words_of(best) + "\n"


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


def test_generate_writes_index_and_end_of_each_when_json_lines_stream(
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


def test_generate_ends_one_completion_alone_when_it_has_a_stop_string(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = f"t{tokens(2, 1)[1]}"

    assert run(server, f"--n=2 --max-tokens=5 --json --stop={stop}") == 0

    content = json.loads(capsys.readouterr().out)
    first, second = content["completions"]
    assert first["token_ids"] == tokens(5, 0)
    assert second["text"] == words_of(tokens(1, 1)) + " "
    assert second["token_ids"] == tokens(2, 1)
    assert (second["finish_reason"], second["stop_string"]) == ("stop", stop)
    assert "stop_string" not in content


def test_generate_ends_the_request_when_every_completion_has_a_stop_string(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = " ".join(f"--stop=t{tokens(3, index)[1 + index]}" for index in range(2))

    assert run(server, f"--n=2 --max-tokens=100000 --json {stops}") == 0

    content = json.loads(capsys.readouterr().out)
    assert [len(part["token_ids"]) for part in content["completions"]] == [2, 3]
    assert (content["finish_reason"], content["usage"]["num_output_tokens"]) == ("stop", 5)


def test_generate_keeps_the_score_when_the_best_has_a_stop_string(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = f"t{tokens(1, 0)[0]}"

    assert run(server, f"--beam-width=1 --max-tokens=3 --json --stop={stop}") == 0

    content = json.loads(capsys.readouterr().out)
    assert (content["text"], content["finish_reason"], content["stop_string"]) == (
        "", "stop", stop,
    )  # fmt: skip
    assert content["score"] == pytest.approx(sum(map(logprob_of, tokens(3, 0))) / 3)


def test_generate_sends_every_flag_when_given(server: FakeServer) -> None:
    flags = (
        "--n=2 --beam-width=4 --length-penalty=-1.5 --early-stopping=always --max-tokens=1"
        " --priority=-7 --tenant=me --deadline-s=2.5 --adapter=poet --cache-salt=pepper"
        " --bypass-prefix-cache --num-public-prefix-tokens=3"
    )

    assert run(server, flags) == 0

    (sent,) = server.fake.requests
    beams = sent.sampling_params.beam_search
    assert (beams.width, beams.length_penalty, beams.early_stopping) == (4, -1.5, 2)
    assert (sent.priority, sent.tenant, sent.adapter) == (-7, "me", "poet")
    assert (sent.cache_salt, sent.bypass_prefix_cache) == ("pepper", True)
    assert sent.num_public_prefix_tokens == 3
    assert sent.deadline.ToTimedelta().total_seconds() == 2.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length-penalty=1"], "--length-penalty goes with --beam-width"),
        (["--early-stopping=never"], "--early-stopping goes with --beam-width"),
        (["--early-stopping=soon", "--beam-width=2"], "invalid choice: 'soon'"),
        (["--deadline-s=0"], "--deadline-s: 0 is no time from now"),
        (["--deadline-s=nan"], "--deadline-s: nan is no time from now"),
        (["--priority=x"], "invalid integer value"),
    ],
)
def test_generate_exits_with_2_when_flags_are_bad(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *flags, "x"])

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_several_texts_stream_in_order_when_they_end_out_of_order() -> None:
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
