"""Errors of the client library as those of OpenAI's API."""

from __future__ import annotations

import pytest

from splitserve_client import RequestFailed
from splitserve_gateway.http.errors import api_error


@pytest.mark.parametrize(
    ("reason", "status"), [("ROW_FAILED", 500), ("EXECUTOR_LOST_REPEATEDLY", 422)]
)
def test_api_error_is_not_repeated_by_clients_when_executors_died_of_the_request(
    reason: str, status: int
) -> None:
    error = api_error(RequestFailed("it failed", reason=reason))
    assert (error.status, error.code) == (status, reason.lower())
