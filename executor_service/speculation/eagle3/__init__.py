"""EAGLE-3 head: a draft of one layer that reads hidden states of the target model's layers."""

from executor_service.speculation.eagle3.head_model import HeadModel, HeadStates, states_shape
from executor_service.speculation.eagle3.head_weights import (
    HeadConfig,
    HeadWeights,
    is_head,
    read_head_config,
    read_head_weights,
)

__all__ = [
    "HeadConfig",
    "HeadModel",
    "HeadStates",
    "HeadWeights",
    "is_head",
    "read_head_config",
    "read_head_weights",
    "states_shape",
]
