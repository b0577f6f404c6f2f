"""Audio of speech models: numbers of preprocessor_config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor_service.checkpoint import read_audio_info
from executor_service.errors import ModelUnreadable, ModelUnsupported
from executor_service.steps import AudioInfo

CONFIG: Any = SimpleNamespace(num_mel_bins=80, max_source_positions=1500)


def write(directory: Path, **content: object) -> Path:
    (directory / "preprocessor_config.json").write_text(json.dumps(content))
    return directory


def test_numbers_are_those_of_whisper_when_there_is_no_file(tmp_path: Path) -> None:
    assert read_audio_info(CONFIG, tmp_path) == AudioInfo(80, 3000, 1500, 16_000, 160, 400)


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    write(tmp_path, feature_size=80, sampling_rate=8000, hop_length=80, n_fft=200, chunk_length=30)
    assert read_audio_info(CONFIG, tmp_path) == AudioInfo(80, 3000, 1500, 8000, 80, 200)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"feature_size": 128}, "feature_size is 128: not served; supported: 80"),
        ({"hop_length": 0}, "hop_length is 0"),
        ({"n_fft": "400"}, 'n_fft is "400"'),
        ({"sampling_rate": 10**6}, "sampling_rate is 1000000"),
    ],
)
def test_file_is_refused_by_field(tmp_path: Path, content: dict[str, object], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        read_audio_info(CONFIG, write(tmp_path, **content))


@pytest.mark.parametrize("text", ["[]", "{", "\x00"])
def test_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ModelUnreadable, match="preprocessor_config"):
        read_audio_info(CONFIG, tmp_path)
