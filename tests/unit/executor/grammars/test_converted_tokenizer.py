"""Grammars are compiled for a tokenizer that was converted, as for one that lies in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from executor_service.checkpoint.folder import Checkpoint
from executor_service.checkpoint.tokenizer_files import read_tokenizer
from executor_service.grammars.vocabulary import Vocabulary, read_token_bytes
from tests.support.models.tokenizer_folders import FOLDERS


@pytest.mark.parametrize("kind", ["sentencepiece", "vocab and merges", "tekken with config"])
def test_a_vocabulary_is_read_when_its_tokenizer_was_converted(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    FOLDERS[kind](tmp_path)
    files = read_tokenizer(Checkpoint(tmp_path, (), {})).files

    texts = read_token_bytes(files["tokenizer.json"], 0)
    assert any(text.strip() == b"the" for text in texts) or b"hello" in texts
    assert Vocabulary.read(files["tokenizer.json"], 0, (2,)).has_text
