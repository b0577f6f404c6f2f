"""Texts of other processes: JSON, and names of files."""

from __future__ import annotations

import pytest

from splitserve_common import check_file_name, parse_json


@pytest.mark.parametrize("text", ["[" * 9**5, '{"a":' * 9**5, b"\xff", "", "[1,]", "9" * 9999])
def test_parse_json_raises_value_error_when_invalid(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_parse_json_passes_options_on() -> None:
    assert parse_json(b'{"a": [1, "\xc3\xa9"]}') == {"a": [1, "é"]}
    assert parse_json("[NaN]", parse_constant=str) == ["NaN"]
    assert parse_json('{"a": 1}', object_pairs_hook=list) == [("a", 1)]


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "additional_chat_templates/tool use.jinja", "ü.json", ".hidden", "x" * 255],
)
def test_file_name_is_accepted_when_inside_its_folder(name: str) -> None:
    check_file_name(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "0 characters"),
        ("x" * 256, "256 characters"),
        ("a\x1b[2Jb", "unprintable"),
        ("a\nb", "unprintable"),
        ("a\x00", "unprintable"),
        ("a\u202eb", "unprintable"),
        ("a\x7f", "unprintable"),
        ("../a", "relative path"),
        ("a/../../b", "relative path"),
        ("/etc/passwd", "relative path"),
        ("a//b", "relative path"),
        ("a/", "relative path"),
        (".", "relative path"),
        ("a\\b", "relative path"),
        ("c:a", "relative path"),
    ],
)
def test_file_name_is_refused_when_unsafe(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_file_name(name)
