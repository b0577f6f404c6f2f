"""`splitserve bench` against the bundled model over gRPC and HTTP, and its reports."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from splitserve_bench.command import main
from splitserve_client import Client
from tests.clients.stack import ServedModel
from tests.support.processes.forked import ROOT

TRACES = ROOT / "tests" / "support" / "bench"


def bench(*argv: str, tmp_path: Path) -> list[dict[str, object]]:
    """The targets of the report; every request was answered."""
    path = tmp_path / "report.json"
    assert main([*argv, "--quiet", "--json", str(path), "--timeout", "240s"]) == 0
    targets: list[dict[str, object]] = json.loads(path.read_text())["targets"]
    return targets


def targets_of(served: ServedModel) -> list[str]:
    if not served.scheduler:
        pytest.skip("another engine has no gRPC")
    return [f"ours=grpc://{served.scheduler}", f"http={served.base_url}/v1"]


def test_two_targets_take_turns_and_are_compared(
    served: ServedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.svg"
    targets = bench(
        *(*targets_of(served), "--rate=50", "--requests=12", "--prompt-tokens=uniform:20:60"),
        *("--output-tokens=6", "--rounds=2", "--count-tokens", f"--picture={picture}"),
        tmp_path=tmp_path,
    )

    counts = [target["requests"] for target in targets]
    assert counts[0] == counts[1] | {"num_preemptions": counts[0]["num_preemptions"]}  # type: ignore[index, operator]
    assert counts[0]["num_completed"] == 24  # type: ignore[index]
    # As many tokens as were wanted, and of no prompt anything was known.
    assert counts[0]["num_output_tokens"] == counts[0]["num_wanted_tokens"] == 24 * 6  # type: ignore[index]
    assert counts[0]["num_cached_tokens"] == 0  # type: ignore[index]
    for target in targets:
        assert target["errors"] == {}
        assert len(target["rounds"]) == 2  # type: ignore[arg-type]
        # What comes together with a first token has no time between; where that is, load decides.
        assert target["latency_s"]["itl"]["count"] <= 24 * 5  # type: ignore[index]
    ElementTree.parse(picture)
    said = capsys.readouterr().out
    assert "http compared with ours:" in said

    report = str(tmp_path / "report.json")
    assert main(["compare", report]) == 0
    assert capsys.readouterr().out.strip() in said


def test_conversations_find_their_history_in_the_prefix_cache(
    served: ServedModel, tmp_path: Path
) -> None:
    (target, *_) = bench(
        *(targets_of(served)[0], "--concurrency=2", "--requests=4", "--turns=3"),
        *("--prompt-tokens=40", "--output-tokens=8", "--shared-prefix=64"),
        tmp_path=tmp_path,
    )

    requests = target["requests"]
    assert requests["num_completed"] == 12  # type: ignore[index]
    # 64 + 40 tokens, and in each later turn 8 + 40 more.
    assert requests["num_prompt_tokens"] == 4 * (104 + 152 + 200)  # type: ignore[index]
    # A later turn finds at least all whole blocks of the prompt and the answer before it.
    assert requests["num_cached_tokens"] >= 4 * (96 + 144)  # type: ignore[index]


@pytest.mark.parametrize(("name", "num_requests"), [("azure.csv", 4), ("mooncake.jsonl", 4)])
def test_recorded_trace_is_played(
    name: str, num_requests: int, served: ServedModel, tmp_path: Path
) -> None:
    (target,) = bench(
        *(targets_of(served)[0], "--trace", str(TRACES / name), "--speed=100"),
        # One after another, so that what they share is in the cache.
        "--max-open=1",
        *("--max-prompt-tokens=800", "--max-output-tokens=5"),
        tmp_path=tmp_path,
    )

    requests = target["requests"]
    assert requests["num_completed"] == num_requests  # type: ignore[index]
    has_prefixes = name == "mooncake.jsonl"
    assert (requests["num_cached_tokens"] > 0) == has_prefixes  # type: ignore[index]


def test_refusals_are_counted_and_the_command_fails(
    served: ServedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scheduler, _) = targets_of(served)
    with Client(served.scheduler) as client:
        too_many = client.get_model().max_model_len + 1

    code = main([scheduler, "--rate=100", "--requests=3", f"--prompt-tokens={too_many}", "--quiet"])

    assert code == 1
    assert "3 failed with PROMPT_TOO_LONG" in capsys.readouterr().out
