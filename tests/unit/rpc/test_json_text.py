"""What is no JSON is a ValueError, whatever is wrong with it."""

from __future__ import annotations

import pytest

from splitserve_rpc.text import parse_json


@pytest.mark.parametrize("text", ["[" * 9**5, '{"a":' * 9**5, b"\xff", "", "[1,]", "9" * 9999])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_json_is_read_as_ever() -> None:
    assert parse_json(b'{"a": [1, "\xc3\xa9"]}') == {"a": [1, "é"]}
    assert parse_json("[NaN]", parse_constant=str) == ["NaN"]
    assert parse_json('{"a": 1}', object_pairs_hook=list) == [("a", 1)]
