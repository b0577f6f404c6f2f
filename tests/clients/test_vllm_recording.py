"""The gateway answers as vLLM's server did, except for the table in docs/vllm.md."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.clients.exchange import Answer, send
from tests.clients.known_differences import Known, outdated, read_table, unknown
from tests.clients.openai_requests import REQUESTS
from tests.clients.record_vllm import recorded_answers
from tests.clients.shape import Difference, differences
from tests.clients.stack import ServedModel
from tests.support.processes.forked import ROOT


def body(**fields: object) -> Answer:
    return Answer(200, "application/json", {"id": "a", "n": 1, "text": "fox", **fields})


def chunk(text: str, finish: str | None = None, index: int = 0) -> list[Any]:
    choice = {"index": index, "text": text, "finish_reason": finish}
    return [None, {"id": "a", "choices": [choice]}]


def stream(*events: list[Any]) -> Answer:
    return Answer(200, "text/event-stream", events=[*events, [None, "[DONE]"]])


def found(theirs: Answer, ours: Answer) -> list[tuple[str, str, str]]:
    return [(item.path, item.theirs, item.ours) for item in differences("r", theirs, ours)]


@pytest.mark.parametrize("area", REQUESTS)
def test_recording_answers_each_request_and_equals_itself(
    area: str,
) -> None:
    answers = recorded_answers(area)

    assert list(answers) == list(REQUESTS[area])
    assert [
        item
        for name, answer in answers.items()
        for item in differences(name, answer, copy.deepcopy(answer))
    ] == []


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (body(id="b"), []),
        (body(n=2), [("value of body.n", "1", "2")]),
        (body(n="1"), [("body.n", "integer", "string"), ("value of body.n", "1", '"1"')]),
        (body(n=None), [("body.n", "integer", "null"), ("value of body.n", "1", "null")]),
        (body(n=1.0), [("body.n", "integer", "number")]),
        (body(more=None), [("body.more", "absent", "null")]),
        (body(more={"a": [1]}), [("body.more", "absent", "object")]),
        (Answer(400, "application/json", {}), [("status", "200", "400")]),
        (Answer(200, "text/plain", "fox"), [("content_type", "application/json", "text/plain")]),
    ],
)
def test_differences_are_types_and_values_when_bodies_differ(
    ours: Answer, expected: list[tuple[str, str, str]]
) -> None:
    assert found(body(), ours) == expected


def test_differences_of_arrays_are_told_once_for_all_elements() -> None:
    theirs, ours = body(choices=[{"a": 1}, {"a": None}]), body(choices=[{"a": 1}, {"b": None}])

    assert found(theirs, ours) == [
        ("body.choices[].a", "integer or null", "integer"),
        ("body.choices[].b", "absent", "null"),
    ]


def test_keys_that_are_data_are_no_shape_but_a_fact() -> None:
    theirs, ours = body(top_logprobs=[{" fox": -1.0}]), body(top_logprobs=[{" owl": -1.0}])

    assert found(theirs, ours) == []
    assert found(theirs, body(top_logprobs=[{" fox": -1.001}])) == []
    assert found(theirs, body(top_logprobs=[{" fox": -1.1}])) == [
        ("value of body.top_logprobs[0]. fox", "-1.0", "-1.1")
    ]


def test_differences_are_none_when_a_stream_is_cut_otherwise() -> None:
    theirs = stream(chunk("Once"), chunk(" upon"), chunk(" a", "stop"))
    ours = stream(chunk("Once up"), chunk("on a", "stop"))

    assert found(theirs, ours) == []


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (
            stream(chunk("Once"), chunk(" up", "stop")),
            [("value of body.choice 0.text", '"Once upon"', '"Once up"')],
        ),
        (
            stream(chunk("Once"), chunk(" upon", "length")),
            [("value of body.choice 0.finish_reason", '"stop"', '"length"')],
        ),
        (
            stream(chunk("Once upon", "stop")),
            [
                ("order of events", "text finish; done", "finish; done"),
                ("text: data", "object", "absent"),
                ("text: event", "None", "absent"),
            ],
        ),
        (
            Answer(200, "text/event-stream", events=[chunk("Once"), chunk(" upon", "stop")]),
            [
                ("done: data", "string", "absent"),
                ("done: event", "None", "absent"),
                ("order of events", "text finish; done", "text finish"),
            ],
        ),
    ],
)
def test_differences_are_found_when_a_stream_says_something_else(
    ours: Answer, expected: list[tuple[str, str, str]]
) -> None:
    assert found(stream(chunk("Once"), chunk(" upon", "stop")), ours) == expected


def test_streams_of_several_choices_may_mix_them() -> None:
    theirs = stream(chunk("a"), chunk("b", index=1), chunk("c", "stop"), chunk("d", "stop", 1))
    ours = stream(chunk("b", index=1), chunk("d", "stop", 1), chunk("a"), chunk("c", "stop"))

    assert found(theirs, ours) == []


TABLE = """
## Other
| request | path | vLLM | here | why |
|---|---|---|---|---|
| `all*` | x | 1 | 2 | not ours |

## Differences
| request | path | vLLM | here | why |
|---|---|---|---|---|
| `chat*, completion*` | `body.a[].b` | null | absent | `b` means nothing here |
| `*` | `status` | 4* | 400 | |

## More
"""


def test_table_covers_its_patterns_and_reports_unused_rows() -> None:
    rows = read_table(TABLE, "Differences")
    covered = Difference("chat_n", "body.a[].b", "null", "absent")
    other = Difference("response", "body.a[].b", "null", "absent")

    assert rows == [
        Known("chat*, completion*", "body.a[].b", "null", "absent"),
        Known("*", "status", "4*", "400"),
    ]
    assert unknown([covered, other], rows) == [other]
    assert outdated([covered, other], rows) == [rows[1]]


DOCS = ROOT / "docs" / "vllm.md"
HEADING = "Differences from vLLM's server"


def test_answers_differ_from_vllm_only_as_documented(served: ServedModel) -> None:
    known = read_table(DOCS.read_text(), HEADING)

    found = [
        item
        for area, requests in REQUESTS.items()
        for name, theirs in recorded_answers(area).items()
        for item in differences(
            name,
            theirs,
            send(served.base_url, requests[name], served.model),
            facts="sampled" not in name,
        )
    ]

    assert "\n".join(map(str, unknown(found, known))) == ""
    assert outdated(found, known) == []
