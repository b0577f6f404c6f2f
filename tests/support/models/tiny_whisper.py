"""A tiny Whisper checkpoint with random weights: multilingual, with a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SAMPLING_RATE = 16_000
NUM_MEL_BINS = 16
# A window is one second: 100 frames of 10 ms become 50 positions, the unit of timestamps.
NUM_POSITIONS = 50
MAX_TARGET_POSITIONS = 96
LANGUAGES = ("en", "de", "fr")
_NUM_BYTES = 256
_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
TOKEN_IDS = {token: _NUM_BYTES + index for index, token in enumerate(_SPECIAL)}
EOS = TOKEN_IDS["<|endoftext|>"]
START = TOKEN_IDS["<|startoftranscript|>"]
NO_TIMESTAMPS = TOKEN_IDS["<|notimestamps|>"]
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
VOCAB_SIZE = FIRST_TIMESTAMP + NUM_POSITIONS + 1
# Token of the byte of a space.
_SPACE = 220
# Timestamps and the end are tokens with larger logits than others, so that some are sampled.
_SPECIAL_SCALE = 1.5


def make_tiny_whisper(directory: Path, seed: int = 0) -> Path:
    """Saves the checkpoint in `directory`, which is returned."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=NUM_MEL_BINS,
        max_source_positions=NUM_POSITIONS,
        max_target_positions=MAX_TARGET_POSITIONS,
        init_std=0.3,
        pad_token_id=EOS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = WhisperForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            embeddings = model.get_input_embeddings().weight
            embeddings[[EOS, *range(FIRST_TIMESTAMP, VOCAB_SIZE)]] *= _SPECIAL_SCALE
    model.generation_config = GenerationConfig(**generation_settings())
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    feature_extractor().save_pretrained(directory)
    return directory


def generation_settings() -> dict[str, Any]:
    """Contents of generation_config.json."""
    return {
        "is_multilingual": True,
        "decoder_start_token_id": START,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "bos_token_id": EOS,
        "lang_to_id": {f"<|{name}|>": TOKEN_IDS[f"<|{name}|>"] for name in LANGUAGES},
        "task_to_id": {name: TOKEN_IDS[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": TOKEN_IDS["<|startofprev|>"],
        "max_initial_timestamp_index": 10,
        "max_length": MAX_TARGET_POSITIONS,
        "suppress_tokens": [7, 9, START, *(TOKEN_IDS[f"<|{name}|>"] for name in LANGUAGES)],
        "begin_suppress_tokens": [_SPACE, EOS],
        "return_timestamps": False,
    }


def feature_extractor() -> Any:  # noqa: ANN401
    """The feature extractor of such a model."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(
        feature_size=NUM_MEL_BINS, sampling_rate=SAMPLING_RATE, chunk_length=1
    )


def noisy_tone(seed: int, num_seconds: float = 1.0) -> npt.NDArray[np.float32]:
    """Samples of a sound that rises; the same arguments give the same."""
    generator = np.random.default_rng(seed)
    times_s = np.arange(round(num_seconds * SAMPLING_RATE)) / SAMPLING_RATE
    low, rise, noise = generator.uniform((100, 100, 0), (3000, 2000, 0.3))
    tone = np.sin(2 * np.pi * (low + rise * times_s) * times_s)
    sound = 0.4 * tone + noise * generator.standard_normal(len(times_s))
    samples: npt.NDArray[np.float32] = sound.astype(np.float32)
    return samples


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    timestamps = [f"<|{index * 0.02:.2f}|>" for index in range(NUM_POSITIONS + 1)]
    tokenizer.add_tokens([AddedToken(token) for token in timestamps])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "WhisperTokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
