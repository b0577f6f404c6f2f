"""Requests to OpenAI servers and their parsed answers, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.load import LocalLoad, Pace, TargetUnusable
from splitserve_bench.reports import TargetReport, report_of
from splitserve_bench.runs import RunConfig, run_load
from splitserve_bench.targets import AskFailed, AskOptions
from splitserve_bench.targets.openai_target import AnswerReader, OpenAiTarget
from splitserve_bench.workloads import Conversation, PromptPiece, Turn
from tests.support.bench.targets import (
    Answer,
    OpenAiServer,
    at,
    delta,
    end,
    event,
    run_virtually,
    text,
    usage,
)

NAMES = st.sampled_from([
    "choices", "delta", "content", "text", "finish_reason", "tool_calls", "usage", "error",
    "completion_tokens", "prompt_tokens", "prompt_tokens_details", "cached_tokens", "message",
])  # fmt: skip
GOOD = Answer([(0.3, text("a")), (0.2, text("b", "length")), (0.1, end(10, 2, 4))])


def ask(
    server: OpenAiServer,
    conversations: Sequence[Conversation],
    options: AskOptions | None = None,
) -> TargetReport:
    target = OpenAiTarget(server.client(), options or AskOptions())
    load = LocalLoad([("it", target)], lambda: iter(conversations), Pace())
    run = run_load(load, 1, RunConfig(Pace()), lambda _num_tokens: None)
    ((model, recorder),) = run_virtually(run)
    return report_of("it", "http://server/v1", model, recorder)


def after_probe(answer: Answer, num_probes: int = 1) -> Callable[[int], Answer]:
    """The good one first, to what is asked before the load."""
    return lambda number: GOOD if number < num_probes else answer


def of_one(*pieces: tuple[float, bytes]) -> TargetReport:
    return ask(OpenAiServer(after_probe(Answer(pieces))), at(0))


def mean(report: TargetReport, metric: str) -> float:
    value: float = report.content["latency_s"][metric]["mean"]["value"]
    return value


def test_completion_is_asked_with_exact_tokens_and_timed_exactly() -> None:
    server = OpenAiServer(lambda _number: GOOD)

    report = ask(server, at(0, 5), AskOptions(token_range=(10, 90), extra_body={"top_k": 3}))

    _probe, first, second = server.bodies
    assert (first["path"], first["model"]) == ("/v1/completions", "some-model")
    assert len(first["prompt"]) == 10
    assert all(10 <= token_id < 90 for token_id in first["prompt"])
    assert first["prompt"] != second["prompt"]
    assert (first["max_tokens"], first["temperature"], first["top_k"]) == (4, 0, 3)
    assert (first["ignore_eos"], first["stream"]) == (True, True)
    assert first["stream_options"] == {"include_usage": True}
    assert mean(report, "ttft") == pytest.approx(0.3)
    assert mean(report, "gap") == pytest.approx(0.2)
    assert mean(report, "tpot") == pytest.approx(0.2)
    assert mean(report, "e2e") == pytest.approx(0.6)
    requests = report.content["requests"]
    assert (requests["num_prompt_tokens"], requests["num_cached_tokens"]) == (20, 8)
    assert (requests["num_output_tokens"], requests["num_wanted_tokens"]) == (4, 8)
    assert report.content["model"] == "some-model"


def test_events_count_as_one_arrival_when_together() -> None:
    whole = text("a") + text("b") + text("c", "length")
    report = of_one((0.5, whole[:30]), (0.1, whole[30:-20]), (0.2, whole[-20:]), (0.0, end(1, 3)))

    assert mean(report, "ttft") == pytest.approx(0.6)
    assert mean(report, "gap") == pytest.approx(0.2)
    # Two tokens after the first, in 0.2 s.
    assert mean(report, "tpot") == pytest.approx(0.1)


def test_tokens_are_counted_when_every_event_has_usage() -> None:
    report = of_one(
        (0.5, text("a", usage=usage(10, 1))),
        (0.9, text("bcd", usage=usage(10, 4))),
        (0.2, text("e", "length", usage=usage(10, 5))),
        (0.0, end(10, 5)),
    )

    # Three of 0.3 s each, and one of 0.2 s.
    itl = report.content["latency_s"]["itl"]
    assert itl["count"] == 4
    assert itl["mean"]["value"] == pytest.approx(1.1 / 4)
    assert (itl["smallest"], itl["largest"]) == (pytest.approx(0.2), pytest.approx(0.3))


def test_usage_in_every_event_is_asked_for_when_told() -> None:
    server = OpenAiServer(lambda _number: GOOD)

    ask(server, at(0), AskOptions(counts_tokens=True, ignores_eos=False, model="mine"))

    body = server.bodies[-1]
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "ignore_eos" not in body
    assert body["model"] == "mine"


def test_chat_has_as_many_words_as_make_the_tokens() -> None:
    """Here a word has three tokens, and the template has seven."""

    def answer(_number: int) -> Answer:
        num_words = sum(len(each["content"].split()) for each in server.bodies[-1]["messages"])
        return Answer([(0.1, delta("stop", content="so")), (0.0, end(7 + 3 * num_words, 1))])

    server = OpenAiServer(answer)
    turns = (Turn((PromptPiece(0, 300),), 8), Turn((PromptPiece(1, 30),), 8))

    report = ask(server, [Conversation(0, turns)], AskOptions(endpoint="chat"))

    *_probes, first, second = server.bodies
    assert first["path"] == "/v1/chat/completions"
    assert [len(each["content"].split()) for each in first["messages"]] == [100]
    roles = [each["role"] for each in second["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1]["content"] == "so"
    assert len(second["messages"][2]["content"].split()) == 10
    assert report.content["requests"]["num_prompt_tokens"] == 307 + 7 + 3 * 111


def test_later_turn_of_completions_begins_with_the_prompt_before() -> None:
    server = OpenAiServer(lambda _number: GOOD)
    turns = (Turn((PromptPiece(0, 12),), 2), Turn((PromptPiece(1, 5),), 2))

    ask(server, [Conversation(0, turns)])

    first, second = (body["prompt"] for body in server.bodies[1:])
    assert second[:12] == first
    # And two tokens in place of the answer.
    assert len(second) == 12 + 2 + 5


def test_reasoning_and_tool_calls_are_tokens() -> None:
    report = of_one(
        (0.1, delta(role="assistant", content="")),
        (0.2, delta(reasoning_content="hm")),
        (0.3, delta(tool_calls=[{"index": 0}])),
        (0.4, delta("stop")),
        (0.0, b"data: [DONE]\n\n"),
    )

    assert mean(report, "ttft") == pytest.approx(0.3)
    assert report.content["latency_s"]["gap"]["count"] == 1


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer([(0, b'{"error": {"message": "slow"}}')], 429), "http_429", "slow"),
        (Answer([(0, b"<html>" + b"x" * 100_000)], 502), "http_502", "<html>xxx"),
        (Answer([(0, text("a"))]), "stream_cut", "without a finish"),
        (Answer([(0, text("a")), (0, b"data: {\n\n")]), "bad_answer", "not JSON"),
        (Answer([(0, b"data: 5\n\n")]), "bad_answer", "not an object"),
        (Answer([(0, b"data: " + b"[" * 100_000 + b"\n\n")]), "bad_answer", "not JSON"),
        (Answer([(0, event({"choices": "a"}))]), "bad_answer", "choices"),
        (Answer([(0, event({"choices": [{"delta": 5}]}))]), "bad_answer", "choices"),
        (Answer([(0, b"[" * 30_000)], 500), "http_500", "[[["),
        (Answer([(0, event({"error": {"message": "oh"}}))]), "failed_in_stream", "oh"),
        (Answer([(0, end(3, 0))]), "empty_answer", "no tokens"),
        (Answer(error=httpx2.ConnectError("refused")), "unreachable", "refused"),
        (Answer(error=httpx2.ReadTimeout("slow")), "timeout", "slow"),
        (
            Answer([(0, text("a"))], error=httpx2.RemoteProtocolError("cut")),
            "connection_lost",
            "cut",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_failure_has_a_kind(answer: Answer, kind: str, message: str) -> None:
    report = ask(OpenAiServer(after_probe(answer)), at(0))

    (found,) = report.content["errors"].items()
    assert found[0] == kind
    assert message in found[1]["first"]
    assert report.content["requests"]["num_failed"] == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(NAMES, values, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(NAMES, JSON, max_size=4), max_size=4))
def test_events_of_any_content_are_read_or_refused(events: list[dict[str, object]]) -> None:
    reader = AnswerReader()
    with suppress(AskFailed):
        for each in events:
            came, num_tokens = reader.feed(event(each))
            assert num_tokens is None or 0 < num_tokens < 2**31
            assert came in (True, False)
        reader.finish()


def test_unterminated_event_is_given_up_when_too_large() -> None:
    report = of_one(*[(0.0, b"x" * 2**20)] * 20)

    assert set(report.content["errors"]) == {"bad_answer"}


@pytest.mark.parametrize("models", [{}, {"data": []}, [], {"data": [{}]}])
def test_target_is_unusable_when_it_names_no_model(models: object) -> None:
    with pytest.raises(TargetUnusable, match="give --model"):
        ask(OpenAiServer(lambda _number: GOOD, models), at(0))


def test_target_is_unusable_with_a_hint_when_url_incomplete() -> None:
    with pytest.raises(TargetUnusable, match=r"most URLs end with /v1 \[http_404\]"):
        ask(OpenAiServer(lambda _number: GOOD, None), at(0))
