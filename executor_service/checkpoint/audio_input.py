"""Audio that the encoder of a speech model takes: its configuration, and preprocessor_config.json.

Source: Radford 2022, "Robust speech recognition via large-scale weak supervision", section 2.2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.steps import AudioInfo
from splitserve_common import parse_json

_FILE_NAME = "preprocessor_config.json"
_MAX_FILE_BYTES = 2**20
# Values of all published models, for checkpoints without the file; and the largest ones accepted.
_DEFAULTS = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
_LARGEST = {"sampling_rate": 192_000, "hop_length": 2**14, "n_fft": 2**14}
# The second convolution of the encoder joins so many frames to a position.
_FRAMES_OF_POSITION = 2


def read_audio_info(config: Any, directory: Path) -> AudioInfo:  # noqa: ANN401
    """Returns the audio input of a Whisper model; the file in `directory` may be missing.

    `config`: of `transformers`. Raises ModelUnreadable for a broken file, ModelUnsupported for
    values out of range.
    """
    path = directory / _FILE_NAME
    content: dict[str, Any] = {}
    if path.exists():
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"more than {_MAX_FILE_BYTES} bytes")
            content = parse_json(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
        except (OSError, ValueError) as error:
            raise ModelUnreadable(f"{path}: {error}") from error
    values = {name: content.get(name, default) for name, default in _DEFAULTS.items()}
    for name, value in values.items():
        if not isinstance(value, int) or not 1 <= value <= _LARGEST[name]:
            raise ModelUnsupported(
                f"{path}: {name} is {json.dumps(value)[:80]}: not served; supported: 1 to"
                f" {_LARGEST[name]}"
            )
    num_mel_bins = content.get("feature_size", config.num_mel_bins)
    if num_mel_bins != config.num_mel_bins:
        raise ModelUnsupported(
            f"{path}: feature_size is {json.dumps(num_mel_bins)[:80]}: not served; supported:"
            f" {config.num_mel_bins}, num_mel_bins of config.json"
        )
    return AudioInfo(
        num_mel_bins=config.num_mel_bins,
        num_frames=config.max_source_positions * _FRAMES_OF_POSITION,
        num_positions=config.max_source_positions,
        sampling_rate=values["sampling_rate"],
        hop_length=values["hop_length"],
        fft_length=values["n_fft"],
    )
