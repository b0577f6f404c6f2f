"""Tests how options are resolved from flags, environment and file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from splitserve_options import COMMANDS, OPTIONS, Command, OptionError, options, resolve


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "splitserve.toml"
    path.write_text(
        'block-size = 8\nmax_num_seqs = 4\nmemory-fraction = 0.5\nmodel = "some/model"\n'
    )
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_resolve_gives_every_option_of_the_command_when_nothing_is_set(command: str) -> None:
    values = resolve(command, [], {})  # type: ignore[arg-type]

    expected = {option.key for option in OPTIONS if command in option.commands}
    assert values.keys() == expected


def test_resolve_prefers_flag_when_all_sources_set_it(config_file: Path) -> None:
    argv = ["--config", str(config_file), "--block-size", "32"]

    assert resolve("executor", argv, {"SPLITSERVE_BLOCK_SIZE": "64"})["block_size"] == 32


def test_resolve_prefers_environment_when_the_file_sets_it_too(config_file: Path) -> None:
    environ = {"SPLITSERVE_BLOCK_SIZE": "64", "SPLITSERVE_CONFIG": str(config_file)}

    assert resolve("executor", [], environ)["block_size"] == 64


def test_resolve_reads_file_when_keys_have_hyphens_or_underscores(config_file: Path) -> None:
    values = resolve("executor", [f"--config={config_file}"], {})

    assert (values["block_size"], values["max_num_seqs"], values["model"]) == (8, 4, "some/model")


def test_resolve_leaves_out_keys_of_other_commands(
    config_file: Path,
) -> None:
    values = resolve("scheduler", [f"--config={config_file}"], {})

    assert "block_size" not in values
    assert values["max_num_seqs"] == 4


def test_resolve_treats_variable_as_unset_when_it_is_empty() -> None:
    assert resolve("executor", [], {"SPLITSERVE_BLOCK_SIZE": ""})["block_size"] is None


def test_resolve_drops_the_weaker_of_exclusive_options(
    config_file: Path,
) -> None:
    argv = [f"--config={config_file}", "--num-device-blocks=100"]

    values = resolve("executor", argv, {})

    assert (values["num_device_blocks"], values["memory_fraction"]) == (100, None)


def test_resolve_refuses_exclusive_options_when_one_source_sets_both() -> None:
    with pytest.raises(OptionError, match="exclude each other"):
        resolve("executor", ["--num-device-blocks=100", "--memory-fraction=0.5"], {})


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (
            ["--block-size=0"],
            {},
            "--block-size (flag): 0 is invalid; allowed: an integer from 1",
        ),
        (["--block-size=x"], {}, "--block-size (flag): 'x' is invalid"),
        (["--block-size"], {}, "--block-size: expected one argument"),
        ([], {"SPLITSERVE_BLOCK_SIZE": "257"}, "SPLITSERVE_BLOCK_SIZE (environment): 257"),
        (["--memory-fraction=0"], {}, "a number above 0 and up to 1"),
        (["--memory-fraction=nan"], {}, "nan is invalid"),
        (["--dtype=int8"], {}, "one of auto, float32, bfloat16, float16"),
        (["--listen=localhost"], {}, "allowed: host:port"),
        (["--listen=localhost:65536"], {}, "allowed: host:port"),
        (["--model="], {}, "--model (flag): '' is invalid"),
        (["--blok-size=1"], {}, "--blok-size: unknown option; did you mean --block-size?"),
        (["--pipeline-depth=1"], {}, "an option of serve and scheduler, not of executor"),
        (["model"], {}, "unexpected argument 'model'"),
        (["--config=/nowhere.toml"], {}, "config file /nowhere.toml: No such file"),
    ],
)
def test_resolve_names_option_source_and_range_when_a_value_is_bad(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        resolve("executor", argv, environ)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("blok-size = 1", "blok-size (file {path}): unknown option; did you mean block-size?"),
        ("block-size = '1'", "block-size (file {path}): '1' is invalid"),
        ("block-size = true", "True is invalid"),
        ("no-demo = 1", "1 is invalid; allowed: true or false"),
        ("block-size = 1\nblock_size = 1", "block_size (file {path}): set twice"),
        ("block-size =", "config file {path}: not valid TOML"),
        ("[executor]\nblock-size = 1", "executor (file {path}): unknown option"),
    ],
)
def test_resolve_names_key_and_file_when_the_file_is_bad(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)

    with pytest.raises(OptionError) as caught:
        resolve("executor", [f"--config={path}"], {})

    assert message.format(path=path) in str(caught.value)


def test_resolve_reads_switch_when_it_is_flag_or_variable() -> None:
    assert resolve("serve", ["--no-demo"], {})["no_demo"] is True
    assert resolve("serve", [], {"SPLITSERVE_NO_DEMO": "yes"})["no_demo"] is True
    assert resolve("serve", [], {"SPLITSERVE_NO_DEMO": "0"})["no_demo"] is False


def test_parse_warns_of_no_variable_that_our_images_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dockerfile = Path(__file__).resolve().parents[3] / "Dockerfile"
    environ = dict(re.findall(r"\b(SPLITSERVE_KERNEL\w+)=(\S+)", dockerfile.read_text()))

    options.parse("executor", [], environ)

    assert environ
    assert capsys.readouterr().err == ""


def test_parse_exits_with_2_when_a_value_is_bad(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse("scheduler", ["--max-num-seqs=0"], {})

    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("splitserve scheduler: --max-num-seqs (flag): 0 is invalid")
    assert error.count("\n") == 1


def test_parse_warns_with_close_match_when_a_variable_is_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environ = {"SPLITSERVE_BLOK_SIZE": "1", "SPLITSERVE_ADDRESS": "a:1", "SPLITSERVE_PORT": "tcp"}

    options.parse("executor", [], environ)

    assert capsys.readouterr().err == (
        "splitserve executor: ignored environment variables: SPLITSERVE_BLOK_SIZE"
        " (did you mean SPLITSERVE_BLOCK_SIZE?), SPLITSERVE_PORT\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_parse_names_flags_and_variables_when_asked_for_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse(command, ["--help"], {})  # type: ignore[arg-type]

    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in options.options_of(command):  # type: ignore[arg-type]
        assert (option.flag in text and option.env in text) is not option.hidden


@pytest.mark.parametrize("command", COMMANDS)
def test_option_table_has_valid_defaults_when_they_are_written_as_flags(command: str) -> None:
    values = resolve(command, [], {})  # type: ignore[arg-type]
    argv = []
    for option in options.options_of(command):  # type: ignore[arg-type]
        value = values[option.key]
        if value not in (None, False):
            argv.append(f"{option.flag}={value}")

    assert resolve(command, argv, {}) == values  # type: ignore[arg-type]


ORIGINS = "allowed: *, or origins like"
LISTED = "up to 64 of them separated by commas"
DISCOVERED = "dns:host:port or file:path"
HOSTS = "allowed: *, or names"


@pytest.mark.parametrize(
    ("command", "name", "values", "allowed"),
    [
        ("gateway", "http-cors-origins", ["", "example.org", "https://a/", "https://a,"], ORIGINS),
        ("gateway", "http-cors-origins", ["*,https://a", "https://A", "ftp://a"], ORIGINS),
        ("gateway", "schedulers", ["nonsense", "a:1,", "a:1,b", "a:1 b:2", "a:65536"], LISTED),
        ("executor", "scheduler", ["dns:schedulers", "file:", "dns:a:1,b:2"], DISCOVERED),
        ("scheduler", "allowed-hosts", ["", "a,", "a:8000", "https://a"], HOSTS),
        ("scheduler", "allowed-hosts", ["a.*", "*,a", "a b", "**.a"], HOSTS),
        ("scheduler", "adapter", ["", "a", "a=", "=/a", "a=/a,", "a=/a,b"], "NAME=DIR"),
    ],
)
def test_resolve_refuses_values_of_another_form(
    command: Command, name: str, values: list[str], allowed: str
) -> None:
    for value in values:
        with pytest.raises(OptionError, match=f"--{name} .*{re.escape(allowed)}"):
            resolve(command, [f"--{name}={value}"], {})


@pytest.mark.parametrize(
    ("command", "name", "values"),
    [
        ("gateway", "http-cors-origins", ["*", "https://a.org", "http://localhost:3000,https://b"]),
        ("gateway", "schedulers", ["a:1,[::1]:2", "dns:schedulers:1", "file:/etc/schedulers"]),
        ("executor", "scheduler", ["a:1,b:2", "dns:schedulers:1", "file:/etc/schedulers"]),
        ("executor", "allowed-hosts", ["*", "api.example.org", "*.example.org,gate_way-1"]),
        ("scheduler", "adapter", ["a=/a", "a b=/a b,c=d=e"]),
        ("executor", "listen", ["127.0.0.1:0", "[::1]:50051", "my-host.example.com:65535"]),
    ],
)
def test_resolve_takes_values_as_they_are(command: Command, name: str, values: list[str]) -> None:
    for value in values:
        assert resolve(command, [f"--{name}={value}"], {})[name.replace("-", "_")] == value


def test_resolve_keeps_all_adapters_when_the_flag_is_given_several_times() -> None:
    argv = ["--adapter=a=/a", "--adapter", "b=/b,c=/c"]
    assert resolve("scheduler", argv, {"SPLITSERVE_ADAPTER": "d=/d"})["adapter"] == (
        "a=/a,b=/b,c=/c"
    )
