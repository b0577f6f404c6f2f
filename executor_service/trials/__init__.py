"""Trials at start: code is compared with plain torch before it serves. Each is a `Trial`.

| candidate                | reference              | in              | if it fails            |
|--------------------------|------------------------|-----------------|------------------------|
| model, paged attention   | `transformers`         | model_trial     | model not served       |
| attention backend        | `reference` of kernels | attention_trial | next backend           |
| rotation with KV writes  | plain torch            | attention_trial | no GPU decoder         |
| separate experts         | `transformers`         | experts_trial   | experts dequantised    |
| decoder of our own       | logits of the model    | decoders        | `transformers` serves  |
| packed matrices          | logits of the model    | decoders        | `transformers` serves  |
| packed layers of GPUs    | dequantised weights    | decoders        | dequantised weights    |
| draw, adjust, copy       | plain torch            | kernel_trials   | plain torch serves     |
| updates of adapters      | float64                | adapters_trial  | no decoder's adapters  |
| rows side by side        | rows alone             | rows_trial      | rows grouped by length |
| matrices of their models | vectors of the model   | rows_trial      | plain torch serves     |
| recorded steps and runs  | model not recorded     | runner          | steps are not recorded |

`float32_trial` has the cuts of models, their tokens and the error measures of logits.
"""

from executor_service.trials.adapters_trial import try_low_rank
from executor_service.trials.attention_trial import try_backend, try_layer, try_rotary_write
from executor_service.trials.experts_trial import try_experts
from executor_service.trials.kernel_trials import DRAW_TOLERANCE, try_adjust, try_copy, try_draw
from executor_service.trials.layer_trial import (
    CUT_VOCAB_SIZE,
    FLOAT32_TOLERANCE,
    KnownLogits,
    TrialTokens,
    cut_to_float32,
    embedding_of,
    far_tokens,
    float32_trial,
    near_tokens,
    relative_error,
    whole_numbers,
)
from executor_service.trials.model_trial import (
    can_be_packed,
    rounded_matrices,
    try_model,
    try_replacement,
)
from executor_service.trials.rows_trial import try_rows, try_vectors
from executor_service.trials.trial import Trial, trial_failures

__all__ = [
    "CUT_VOCAB_SIZE",
    "DRAW_TOLERANCE",
    "FLOAT32_TOLERANCE",
    "KnownLogits",
    "Trial",
    "TrialTokens",
    "can_be_packed",
    "cut_to_float32",
    "embedding_of",
    "far_tokens",
    "float32_trial",
    "near_tokens",
    "relative_error",
    "rounded_matrices",
    "trial_failures",
    "try_adjust",
    "try_backend",
    "try_copy",
    "try_draw",
    "try_experts",
    "try_layer",
    "try_low_rank",
    "try_model",
    "try_replacement",
    "try_rotary_write",
    "try_rows",
    "try_vectors",
    "whole_numbers",
]
