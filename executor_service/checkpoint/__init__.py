"""Checkpoints: checks of their files and configuration, and loading of models and tokenizers."""

from executor_service.checkpoint.audio_input import read_audio_info
from executor_service.checkpoint.base_tensors import base_tensors
from executor_service.checkpoint.folder import Checkpoint, check_directory, resolve_checkpoint
from executor_service.checkpoint.generation_config import GenerationConfig, read_generation_config
from executor_service.checkpoint.gguf_tokenizer import TokenizerUnknown, build_gguf_tokenizer
from executor_service.checkpoint.kv_scales import is_kv_scale, read_kv_scales
from executor_service.checkpoint.model_loader import ModelConfig, load_model, read_model
from executor_service.checkpoint.quantised_layers import round_linears
from executor_service.checkpoint.tokenizer_files import (
    ModelTokenizer,
    read_tokenizer,
    with_tokenizer_eos,
)

__all__ = [
    "Checkpoint",
    "GenerationConfig",
    "ModelConfig",
    "ModelTokenizer",
    "TokenizerUnknown",
    "base_tensors",
    "build_gguf_tokenizer",
    "check_directory",
    "is_kv_scale",
    "load_model",
    "read_audio_info",
    "read_generation_config",
    "read_kv_scales",
    "read_model",
    "read_tokenizer",
    "resolve_checkpoint",
    "round_linears",
    "with_tokenizer_eos",
]
