"""Every event is an object of JSON on a line of its own, with the fields of its log call."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_rpc.process_log import (
    MAX_FIELD_CHARS,
    MAX_LINE_CHARS,
    JsonFormatter,
    LineFormatter,
    LogContext,
    log_context,
)
from tests.unit.test_log_events import log_calls

texts = st.one_of(
    st.text(st.characters(codec=None)),
    st.sampled_from(["x\n{}", 'a" , "event": "forged', "b=1 c=2", "%s %d", "\ud800\u2028\x1b[2K"]),
)


def line_of(record: logging.LogRecord) -> str:
    return JsonFormatter().format(record)


def record(
    message: str, *arguments: object, logger: str = "scheduler_service.a"
) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.WARNING, "f.py", 1, message, arguments, None)


def logged(message: str, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line_of(record(message, *arguments)))
    return found


@given(texts, texts)
def test_fields_are_what_was_logged_when_they_are_hostile(first: str, second: str) -> None:
    line = line_of(record("event_name a=%s b=%r: because %s", first, second, first))

    assert len(line.splitlines()) == 1
    assert line.isascii()
    shown = json.loads(line)
    assert shown["event"] == "event_name"
    as_sent = [each.encode("utf-8", "backslashreplace").decode() for each in (first, second)]
    assert shown["fields"] == {"a": as_sent[0], "b": as_sent[1]}


def test_numbers_stay_numbers_and_the_rest_is_text() -> None:
    shown = logged(
        "e a=%d b=%g c=%.1f d=%04o f=%.1f..%.1f g=%s h=%s", 1, 0.5, 2.25, 420, 1, 2, None, 3
    )

    assert shown["fields"] == {
        "a": 1, "b": 0.5, "c": 2.25, "d": "0644", "f": "1.0..2.0", "g": None, "h": 3
    }  # fmt: skip
    assert shown["message"] == "e a=1 b=0.5 c=2.2 d=0644 f=1.0..2.0 g=None h=3"


def test_line_parses_everywhere_when_a_number_is_none() -> None:
    assert logged("event rate=%f", float("nan"))["fields"] == {"rate": "nan"}


def test_line_has_time_level_and_logger() -> None:
    before = datetime.now(UTC)
    shown = logged("event")

    assert (shown["level"], shown["logger"]) == ("WARNING", "scheduler_service.a")
    assert shown["time"].endswith("Z")
    assert before <= datetime.fromisoformat(shown["time"]) <= datetime.now(UTC)


def test_event_is_none_when_a_library_speaks() -> None:
    shown = json.loads(line_of(record("event a=%s", 1, logger="uvicorn.error")))

    assert "event" not in shown
    assert "fields" not in shown
    assert shown["message"] == "event a=1"


def test_error_has_its_type_and_traceback() -> None:
    with pytest.raises(OSError, match="why") as raised:
        raise OSError("why")
    made = record("event")
    made.exc_info = (OSError, raised.value, raised.tb)

    error = json.loads(line_of(made))["error"]
    assert error["type"] == "OSError"
    assert error["traceback"][-1] == "OSError: why"


def test_line_is_bounded_when_a_field_is_long() -> None:
    shown = logged("event a=%s", "x" * 100_000)

    assert len(shown["message"]) == MAX_LINE_CHARS + len("...")
    assert len(shown["fields"]["a"]) == MAX_FIELD_CHARS + len("...")


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_line_names_request_and_trace_when_it_is_about_one(formatter: logging.Formatter) -> None:
    token = log_context.set(LogContext("req_1", "a1" * 16))
    try:
        line = formatter.format(record("event"))
    finally:
        log_context.reset(token)

    assert "req_1" in line
    assert "a1" * 16 in line
    assert "req_1" not in formatter.format(record("event"))


@pytest.mark.parametrize("text", sorted({each.text for each in log_calls()}))
def test_every_event_of_ours_has_a_name_and_all_its_fields(text: str) -> None:
    # As many arguments as it takes, whatever they are.
    arguments: tuple[object, ...] = ()
    while True:
        try:
            text % arguments
            break
        except TypeError as error:
            kinds = "number" in str(error) or "integer" in str(error)
            arguments = (*arguments[:-1], 1) if kinds else (*arguments, "x")
    shown = logged(text, *arguments)

    assert (
        shown["event"]
        == text.split(" ")[0].rstrip(":") % arguments[: text.split(" ")[0].count("%")]
    )
    assert len(shown.get("fields", {})) == text.count("=%")


def test_line_that_is_kept_as_a_whole_has_its_fields_beside_it() -> None:
    made = record("%s", "registered address=a")
    made.__dict__.update(event="registered", fields={"address": "a", "epoch": 2})

    shown = json.loads(line_of(made))
    assert (shown["event"], shown["fields"]) == ("registered", {"address": "a", "epoch": 2})
