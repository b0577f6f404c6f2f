"""Steps on a device: forward pass, sampling, recordings, and the memory that they need."""

from executor_service.runner.forward_pass import (
    ForwardPass,
    PassBatches,
    run_in_parts,
    scores_too_much,
)
from executor_service.runner.kernel_warm_up import (
    compile_kernels,
    full_step_sizes,
    measure_step,
    measure_uncached_step,
    step_sizes,
)
from executor_service.runner.model_runner import ModelRunner
from executor_service.runner.pool_sizes import (
    CacheConfig,
    StepSize,
    build_runner,
    make_worst_step,
    measure_worst_step,
    num_worst_step_blocks,
)
from executor_service.runner.static_inputs import (
    MAX_PROMPT_SIZE,
    StaticInputs,
    decode_shapes,
    prompt_shapes,
)
from executor_service.runner.step_graphs import RecordedModels, StepGraphs
from executor_service.runner.vectors import UncachedRunner

__all__ = [
    "MAX_PROMPT_SIZE",
    "CacheConfig",
    "ForwardPass",
    "ModelRunner",
    "PassBatches",
    "RecordedModels",
    "StaticInputs",
    "StepGraphs",
    "StepSize",
    "UncachedRunner",
    "build_runner",
    "compile_kernels",
    "decode_shapes",
    "full_step_sizes",
    "make_worst_step",
    "measure_step",
    "measure_uncached_step",
    "measure_worst_step",
    "num_worst_step_blocks",
    "prompt_shapes",
    "run_in_parts",
    "scores_too_much",
    "step_sizes",
]
