"""Trial of experts with separate layers against the module of `transformers` that they replace.

Shape letters: E experts, N outputs, K inputs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.model import SeparateExperts, plain_linear
from executor_service.trials.trial import Trial, trial_failures

_NUM_EXPERTS, _WIDTH, _MLP_WIDTH, _NUM_TOKENS = 4, 32, 48, 24
_TOLERANCE = 1e-4
# Index, weights of the experts, and states of the tokens.
_Routed = tuple[Tensor, Tensor, Tensor]


@torch.inference_mode()
def try_experts(like: Any) -> None:  # noqa: ANN401
    """Compares `SeparateExperts` with the code of `like`, on few experts with random weights.

    `like`: experts of `transformers`; it is copied, without its numbers. Raises TrialFailed if they
    compute something else.
    """
    with trial_failures(type(like).__name__):
        plain = _with_random_weights(like)
        separate = _separated(plain)
        Trial(
            reference=lambda case: plain(case[2], case[0], case[1]),
            candidate=lambda case: separate(case[2], case[0], case[1]),
            cases=(_routed(),),
            error_of=lambda _case, expected, actual: float((expected - actual).abs().max()),
            allowed=_TOLERANCE,
            complaint=lambda error: f"outputs of {type(like).__name__} differ by {error:.2g}",
        ).check()


def _with_random_weights(like: Any) -> Any:  # noqa: ANN401
    plain: Any = copy.deepcopy(like)
    plain.num_experts = _NUM_EXPERTS
    plain.config = copy.copy(plain.config)
    plain.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "gate_up_proj": (2 * _MLP_WIDTH, _WIDTH),
        "down_proj": (_WIDTH, _MLP_WIDTH),
        "gate_up_proj_bias": (2 * _MLP_WIDTH,),
        "down_proj_bias": (_WIDTH,),
    }
    for name, shape in shapes.items():
        if hasattr(plain, name):
            is_turned = len(shape) == 2 and plain.is_transposed
            own = (_NUM_EXPERTS, *(reversed(shape) if is_turned else shape))
            numbers = torch.randn(own, generator=generator) / _WIDTH**0.5
            setattr(plain, name, nn.Parameter(numbers, requires_grad=False))
    return plain


def _separated(plain: Any) -> SeparateExperts:  # noqa: ANN401
    gate_up, down = (
        [each.T if plain.is_transposed else each for each in weight.detach()]
        for weight in (plain.gate_up_proj, plain.down_proj)
    )
    halves = [
        each.chunk(2) if plain.is_concatenated else (each[::2], each[1::2]) for each in gate_up
    ]
    return SeparateExperts(
        copy.deepcopy(plain),
        [[plain_linear(half, None) for half in each] for each in halves],
        [plain_linear(each, None) for each in down],
    )


def _routed() -> _Routed:
    """Returns two experts of each token, with their weights, and the states of the tokens."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(_NUM_TOKENS, _NUM_EXPERTS, generator=generator)
    weights, index = scores.topk(2, dim=-1)
    return index, weights, torch.randn(_NUM_TOKENS, _WIDTH, generator=generator)
