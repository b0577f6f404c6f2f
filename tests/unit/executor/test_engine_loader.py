from __future__ import annotations

import re

import pytest

from executor_service.config import ExecutorConfig
from executor_service.engine_loader import load_engine
from splitserve_kernels.cpu.build import BuildFailed
from splitserve_kernels.cpu.library import load_library
from splitserve_rpc import options


@pytest.mark.usefixtures("native_library")
def test_load_engine_announces_another_model_when_its_weights_are_rounded() -> None:
    digests = []
    for quantization in ("none", "int8"):
        values = options.parse("executor", ["--num-device-blocks", "4"], {})
        config = ExecutorConfig.from_options({**values, "quantization": quantization})
        engine = load_engine(config, executor_epoch=1)
        digests.append(engine.info.model.digest)
        assert ("int8" in engine.compute) == (quantization == "int8")
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert digests[0] != digests[1]


@pytest.fixture
def native_library() -> None:
    try:
        load_library()
    except BuildFailed as failure:
        pytest.skip(str(failure))
