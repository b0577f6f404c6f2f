"""Names of files that another process sends."""

from __future__ import annotations

import pytest

from splitserve_rpc.text import check_file_name


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "additional_chat_templates/tool use.jinja", "ü.json", ".hidden", "x" * 255],
)
def test_a_name_is_taken_when_it_stays_in_its_folder(name: str) -> None:
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
def test_a_name_is_refused_when_it_leads_elsewhere_or_cannot_be_shown(
    name: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_file_name(name)
