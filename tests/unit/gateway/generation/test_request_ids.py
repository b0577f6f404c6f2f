"""What requests are called."""

from __future__ import annotations

import re

from splitserve_gateway.generation.choices import answer_id, upstream_id
from splitserve_rpc.process_log import LogContext, log_context


def test_ids_are_those_of_the_http_request_that_is_answered() -> None:
    token = log_context.set(LogContext("req_abc"))
    try:
        assert (answer_id(None), answer_id("job")) == ("abc", "job")
        assert upstream_id(None, 3) == "abc.3"
        assert upstream_id("job", 0) == "job.abc.0"
        assert len(upstream_id("j" * 128, 9999)) < 128
    finally:
        log_context.reset(token)


def test_ids_are_new_ones_where_no_http_request_is_answered() -> None:
    assert re.fullmatch(r"[0-9a-f]{32}\.0", upstream_id(None, 0))
    assert answer_id(None) != answer_id(None)
