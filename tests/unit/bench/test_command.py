"""Arguments of `splitserve bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from splitserve_bench.arguments import BenchConfig, bench_config
from splitserve_bench.command import main
from splitserve_bench.parser import build_parser
from splitserve_bench.targets import TargetRefused, parse_target

OPEN = ["grpc://localhost:50051", "--rate", "2"]


def config(*argv: str, **environ: str) -> BenchConfig:
    return bench_config(build_parser().parse_args(argv), environ)


def test_load_is_what_the_flags_say() -> None:
    parsed = config(
        *("a=localhost:1", "b=http://localhost:2/v1", "--rate=4", "--duration=3s", "--rounds=2"),
        *("--prompt-tokens=uniform:5:9", "--output-tokens=3", "--warm-up=500ms", "--seed=7"),
        *("--prompt-seed=9", "--slo=ttft=200ms,itl=50ms", "--timeout=20s", "--burstiness=0"),
    )

    assert [(each.name, each.url) for each in parsed.targets] == [
        ("a", "grpc://localhost:1"),
        ("b", "http://localhost:2/v1"),
    ]
    conversations = list(parsed.workload())
    assert [each.arrival_s for each in conversations] == [0.25 * n for n in range(1, 13)]
    assert all(5 <= each.turns[0].num_new_tokens <= 9 for each in conversations)
    assert parsed.run.warm_up_s == 0.5
    assert parsed.run.slo.limits_s == (("ttft", 0.2), ("itl", 0.05))
    assert (parsed.run.num_rounds, parsed.run.prompt_seed) == (2, 9)
    assert parsed.load["rate"] == 4
    assert parsed.load["prompt_tokens"] == "uniform:5:9"


def test_prompts_differ_in_each_run() -> None:
    first, second = config(*OPEN), config(*OPEN)

    assert first.run.prompt_seed != second.run.prompt_seed
    assert first.load["prompt_seed"] == first.run.prompt_seed
    assert list(first.workload()) == list(second.workload())


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (["--requests=7"], 7),
        ([], 100),
        (["--requests=7", "--duration=1s"], None),
        (["--requests=7", "--turns=2"], None),
    ],
)
def test_number_of_requests_is_known_only_where_it_is_certain(
    flags: list[str], number: int | None
) -> None:
    assert config(*OPEN, *flags).num_requests == number


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "the following arguments are required: TARGET"),
        (["localhost:1"], "give --rate (open loop), --concurrency (closed loop), or --trace"),
        ([*OPEN, "--concurrency=3"], "give --rate"),
        ([*OPEN, "--trace=x.csv"], "--rate is not allowed with --trace"),
        ([*OPEN, "--rate=0"], "'0' is not above 0"),
        ([*OPEN, "--burstiness=-1"], "'-1' is below 0"),
        ([*OPEN, "--requests=0"], "'0' is not above 0"),
        ([*OPEN, "--prompt-tokens=many"], "allowed: N, uniform"),
        ([*OPEN, "--shared-prefix=1:0"], "allowed: TOKENS or TOKENS:GROUPS"),
        ([*OPEN, "--slo=speed=1s"], "allowed: METRIC=TIME"),
        ([*OPEN, "--token-range=9:3"], "allowed: LOW:HIGH"),
        ([*OPEN, "--extra-body=[]"], "allowed: a JSON object"),
        ([*OPEN, "--extra-body={"], "--extra-body is not JSON"),
        ([*OPEN, "--api-key-file=other=x"], "allowed: NAME=FILE with the name of a target"),
        ([*OPEN, "--json=/there/is/no/such/folder.json"], "--json: '/there/is"),
        ([*OPEN, "--picture=/"], "--picture: '/' cannot be written; allowed: a writable file"),
        ([*OPEN, "--tls-cert=x"], "--tls-cert is given without --tls-key"),
        ([*OPEN, OPEN[0]], "allowed: distinct names (NAME=URL)"),
        (["ftp://localhost", "--rate=1"], "is not a target; allowed: grpc://HOST:PORT"),
        (["http://me:secret@localhost", "--rate=1"], "is visible to all users of this machine"),
    ],
)
def test_command_exits_with_2_when_arguments_are_bad(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)

    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert problem in error
    assert "secret" not in error


def test_target_is_named_by_its_host_by_default() -> None:
    assert parse_target("localhost:9").name == "localhost:9"
    assert parse_target("http://localhost:9/v1?a=b").name == "localhost:9"
    with pytest.raises(TargetRefused):
        parse_target("x=")


def test_key_goes_only_to_its_target(tmp_path: Path) -> None:
    file = str(tmp_path / "key")
    one = config(*OPEN, SPLITSERVE_API_KEY="of the environment")
    two = config(
        *("a=localhost:1", "b=localhost:2", "--rate=1", f"--api-key-file=b={file}"),
        SPLITSERVE_API_KEY="of the environment",
    )

    assert [target.api_key for target in one.targets] == ["of the environment"]
    assert [(each.api_key, each.api_key_file) for each in two.targets] == [
        (None, None),
        (None, Path(file)),
    ]
    assert "of the environment" not in repr(one)
    assert file not in str(two.load)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["localhost:1", "--rate=1"], "localhost:1: cannot connect to localhost:1 in plain text"),
        (["http://localhost:1/v1", "--rate=1"], "[unreachable]"),
        (["http://localhost:1/v1", "--rate=1", "--api-key-file=/nowhere"], "No such file"),
        (["https://localhost:1/v1", "--rate=1", "--tls-ca=/nowhere"], "/nowhere: "),
        (["https://localhost:1/v1", "--rate=1", f"--tls-ca={__file__}"], f"{__file__}: "),
    ],
)
def test_command_is_one_line_and_1_when_no_server_answers(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--quiet"]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("splitserve bench: ")
    assert problem in line


def test_command_says_what_to_install_when_http_needs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)

    assert main(["http://localhost:1/v1", "--rate=1", "--quiet"]) == 1
    assert "pip install 'splitserve[bench]'" in capsys.readouterr().err


def test_compare_fails_in_one_line_when_report_unreadable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(tmp_path / "none.json"), "x.json"]) == 1

    assert capsys.readouterr().err.startswith("splitserve bench: [Errno 2] No such file")
