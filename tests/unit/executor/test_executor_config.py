from __future__ import annotations

import pytest

from executor_service.config import ConfigInvalid, ExecutorConfig
from splitserve_options import options


def _values(**changes: object) -> dict[str, object]:
    return {**options.parse("executor", [], {}), **changes}


def test_config_has_all_options_when_they_are_parsed() -> None:
    config = ExecutorConfig.from_options(_values(max_num_seqs=3))
    assert (config.block_size, config.max_num_seqs) == (None, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", " "),
        ("dtype", "int8"),
        ("kv_cache_dtype", "fp16"),
        ("device", "tpu"),
        ("quantization", "int4"),
        ("cuda_graphs", "on"),
        ("block_size", 0),
        ("block_size", True),
        ("num_device_blocks", -1),
        ("memory_fraction", 0),
        ("memory_fraction", float("nan")),
        ("num_host_blocks", -1),
        ("max_num_seqs", 2**31),
        ("threads", 0),
        ("listen", "50051"),
        ("scheduler", "host:99999"),
        ("advertise_address", "host"),
        ("log_level", "loud"),
        ("exit_on_stdin_eof", 1),
    ],
)
def test_config_names_field_and_value_when_it_is_invalid(name: str, value: object) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        ExecutorConfig.from_options(_values(**{name: value}))
    assert str(caught.value).startswith(f"{name}: {value!r} is not allowed; it takes ")


def test_config_is_refused_when_an_option_is_unknown() -> None:
    with pytest.raises(ConfigInvalid, match="blok_size: unknown option"):
        ExecutorConfig.from_options(_values(blok_size=1))


def test_config_is_refused_when_an_option_is_missing() -> None:
    values = _values()
    del values["model"]
    with pytest.raises(ConfigInvalid, match="model: missing"):
        ExecutorConfig.from_options(values)


def test_config_is_refused_when_two_pool_sizes_are_given() -> None:
    with pytest.raises(ConfigInvalid, match="exclude each other"):
        ExecutorConfig.from_options(_values(num_device_blocks=1, memory_fraction=0.5))
