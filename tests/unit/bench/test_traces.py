"""Recorded traces in the formats of the public ones."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from splitserve_bench.workloads import PromptPiece, PromptTokens, TraceUnreadable, read_trace

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 18:17:05.9799600,12,0
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.509930+00:00,2399,6
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def mooncake(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(timestamp: float, num_prompt: int, num_output: int, *hashes: int) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": num_prompt,
        "output_length": num_output,
        "hash_ids": list(hashes),
    }


def test_azure_trace_of_2023_has_times_and_lengths(tmp_path: Path) -> None:
    conversations = list(read_trace(write(tmp_path, AZURE_2023)))

    assert [each.arrival_s for each in conversations] == pytest.approx([0, 0.052, 2.0])
    turns = [each.turns[0] for each in conversations]
    assert [turn.num_new_tokens for turn in turns] == [4808, 110, 12]
    # What brought nothing is asked for one token.
    assert [turn.num_output_tokens for turn in turns] == [10, 27, 1]
    assert len({turn.pieces[0].key for turn in turns}) == 3


def test_azure_trace_of_2024_has_times_with_a_zone(tmp_path: Path) -> None:
    conversations = list(read_trace(write(tmp_path, AZURE_2024)))

    assert [each.arrival_s for each in conversations] == pytest.approx([0, 1.5])


def test_mooncake_trace_has_equal_prefixes_where_hashes_are_equal(tmp_path: Path) -> None:
    text = mooncake(row(3000, 1300, 52, 46, 47, 48), row(4500, 1500, 1, 46, 47, 99))

    first, second = read_trace(write(tmp_path, text))

    assert (first.arrival_s, second.arrival_s) == (0, 1.5)
    assert first.turns[0].pieces == (
        PromptPiece(46, 512),
        PromptPiece(47, 512),
        PromptPiece(48, 276),
    )
    tokens = PromptTokens(7, 0, 1000)
    prompts = [tokens.of(each.turns[0].pieces) for each in (first, second)]
    assert list(map(len, prompts)) == [1300, 1500]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][1024:1034] != prompts[1][1024:1034]


def test_mooncake_prompt_has_own_tokens_without_hashes(tmp_path: Path) -> None:
    text = mooncake(row(0, 1000, 5, 3), row(0, 1000, 5, 3))

    pieces = [each.turns[0].pieces for each in read_trace(write(tmp_path, text))]

    assert [[piece.num_tokens for piece in each] for each in pieces] == [[512, 488]] * 2
    assert pieces[0][0] == pieces[1][0]
    assert pieces[0][1].key != pieces[1][1].key


def test_trace_never_goes_back_in_time(tmp_path: Path) -> None:
    text = mooncake(row(5, 1, 1), row(9, 1, 1), row(7, 1, 1))

    times = [each.arrival_s for each in read_trace(write(tmp_path, text))]
    assert times == pytest.approx([0, 0.004, 0.004])


def test_trace_is_refused_when_a_line_does_not_end() -> None:
    with pytest.raises(TraceUnreadable, match="/dev/zero:1: line too long"):
        next(read_trace(Path("/dev/zero")))


def test_trace_is_read_as_it_is_needed(tmp_path: Path) -> None:
    text = mooncake(row(0, 8, 1)) + "and here it breaks\n"

    conversations = read_trace(write(tmp_path, text))

    assert next(conversations).turns[0].num_new_tokens == 8
    with pytest.raises(TraceUnreadable, match="trace:2: not JSON"):
        next(conversations)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "trace: no requests; allowed: a trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "trace: no requests"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1}\n' + "[" * 100_000, "too deeply"),
        ("\n", "trace:1: unknown format; allowed: CSV with TIMESTAMP"),
        ("a,b\n1,2\n", "trace:1: unknown format"),
        ("x" * 2**18 + "\n", "trace:1: unknown format"),
        ('{"a": "' + "x" * 2**18 + '"}\n', "trace:1: timestamp is 'None'"),
        (
            'TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10,"' + "1\n" * 2**17,
            "field larger than field limit",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "trace:2: TIMESTAMP is 'soon'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10,x,2\n", "ContextTokens is 'x'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10,1\n", "GeneratedTokens is 'None'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10,-1,2\n", "allowed: 0 to"),
        ('{"timestamp": "x"}\n', "timestamp is 'x'"),
        ('{"timestamp": 0, "input_length": 3}\n', "output_length is 'None'"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 1}\n', "input_length is 'inf'"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [-1]}\n', "hash_ids"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": 5}\n', "hash_ids"),
        (
            '{"timestamp": 0, "input_length": 3, "output_length": 1}\n[]\n',
            "trace:2: the line is of type list",
        ),
    ],
)
def test_trace_is_refused_by_line_when_malformed(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TraceUnreadable) as caught:
        list(read_trace(write(tmp_path, text)))

    assert problem in str(caught.value)


def test_azure_trace_may_have_its_names_in_quotes(tmp_path: Path) -> None:
    first, rest = AZURE_2023.split("\n", 1)
    quoted = ",".join(f'"{name}"' for name in first.split(","))
    plain = list(read_trace(write(tmp_path, AZURE_2023)))

    assert list(read_trace(write(tmp_path, f"{quoted}\n{rest}"))) == plain


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024, mooncake(row(0, 6, 2, 46))])
def test_trace_is_read_packed_and_with_a_byte_order_mark(tmp_path: Path, text: str) -> None:
    plain = list(read_trace(write(tmp_path, text)))

    for content in (text.encode("utf-8-sig"), gzip.compress(text.encode())):
        (tmp_path / "other").write_bytes(content)

        assert list(read_trace(tmp_path / "other")) == plain


@pytest.mark.parametrize("content", [AZURE_2023.encode(), gzip.compress(AZURE_2023.encode())])
def test_trace_is_read_from_a_pipe(tmp_path: Path, content: bytes) -> None:
    plain = list(read_trace(write(tmp_path, AZURE_2023)))
    os.mkfifo(tmp_path / "pipe")
    writing = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[content], daemon=True)
    writing.start()

    # What it was read for once is gone.
    assert list(read_trace(tmp_path / "pipe")) == plain
    writing.join()


@pytest.mark.parametrize(
    "content", [AZURE_2023.encode("utf-16"), gzip.compress(AZURE_2023.encode())[:-12]]
)
def test_trace_is_refused_when_it_is_not_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)

    with pytest.raises(TraceUnreadable, match=r"trace:\d+: .*allowed: UTF-8 text"):
        list(read_trace(tmp_path / "trace"))
