from __future__ import annotations

from dataclasses import fields

import pytest

from executor_service.config import ExecutorConfig
from splitserve_options import options
from splitserve_options.security_table import SECURITY_OPTIONS


def test_config_has_a_field_for_each_option_when_they_are_parsed() -> None:
    values = options.resolve("executor", ["--max-num-seqs=3"], {})
    config = ExecutorConfig.from_options(values)
    assert (config.block_size, config.max_num_seqs) == (None, 3)
    of_security = {option.key for option in SECURITY_OPTIONS}
    named = {field.name for field in fields(config)} - {"security", "metrics"}
    of_metrics = {"metrics_listen", "allowed_hosts"}
    assert named == values.keys() - of_security - of_metrics - {"log_format", "log_level"}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model", " "),
        ("--dtype", "int8"),
        ("--kv-cache-dtype", "fp16"),
        ("--device", "tpu"),
        ("--attention-backend", "fast"),
        ("--quantization", "int4"),
        ("--cuda-graphs", "on"),
        ("--block-size", 0),
        ("--block-size", 257),
        ("--num-device-blocks", -1),
        ("--memory-fraction", 0.0),
        ("--memory-fraction", float("nan")),
        ("--num-host-blocks", -1),
        ("--max-num-seqs", 2**31),
        ("--max-model-len", 1),
        ("--threads", 0),
        ("--listen", "50051"),
        ("--scheduler", "host:99999"),
        ("--advertise-address", "host"),
        ("--log-level", "loud"),
    ],
)
def test_options_name_flag_value_and_range_when_it_is_invalid(flag: str, value: object) -> None:
    option = next(option for option in options.options_of("executor") if option.flag == flag)
    with pytest.raises(options.OptionError) as caught:
        options.resolve("executor", [f"{flag}={value}"], {})
    refusal = f"{flag} (flag): {value!r} is not allowed; it takes {option.allowed}"
    assert str(caught.value) == refusal


def test_options_are_refused_when_two_pool_sizes_are_given() -> None:
    flags = ["--num-device-blocks=1", "--memory-fraction=0.5"]
    with pytest.raises(options.OptionError, match="exclude each other"):
        options.resolve("executor", flags, {})
