"""Choice of the code that computes a model, and the trials that each candidate must pass."""

from executor_service.backends.attention_candidates import (
    DEFAULT_BLOCK_SIZE,
    Candidate,
    LayerDemand,
    WhyNotLayer,
    gpu_candidates,
    time_attention,
)
from executor_service.backends.choose import (
    AUTO,
    NATIVE,
    TORCH,
    LayerCompute,
    choose_compute,
    choose_gpu_attention,
    choose_layer_compute,
    compute_on_cpu,
    compute_on_gpu,
    native_draw,
)
from executor_service.backends.compute import Compute
from executor_service.backends.gpu_kernels import tried_kernel
from executor_service.backends.remembered import ComputeDemand, recall_compute
from executor_service.backends.trial_cache import (
    OFF,
    TRIALS_VARIABLE,
    TrialCache,
    code_digest,
    cpu_digest,
    open_trial_cache,
    trial_key,
)

__all__ = [
    "AUTO",
    "DEFAULT_BLOCK_SIZE",
    "NATIVE",
    "OFF",
    "TORCH",
    "TRIALS_VARIABLE",
    "Candidate",
    "Compute",
    "ComputeDemand",
    "LayerCompute",
    "LayerDemand",
    "TrialCache",
    "WhyNotLayer",
    "choose_compute",
    "choose_gpu_attention",
    "choose_layer_compute",
    "code_digest",
    "compute_on_cpu",
    "compute_on_gpu",
    "cpu_digest",
    "gpu_candidates",
    "native_draw",
    "open_trial_cache",
    "recall_compute",
    "time_attention",
    "trial_key",
    "tried_kernel",
]
