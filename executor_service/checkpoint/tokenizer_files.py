"""Tokenizer of a checkpoint in the form for clients: one tokenizer.json, whatever the source.

`transformers` reads the source (tokenizer.json, a SentencePiece model, vocabulary and merges,
Mistral's tekken.json) together with tokenizer_config.json and added_tokens.json; the result is
written as tokenizer.json. Token ids are those of its AutoTokenizer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from executor_service.checkpoint.folder import Checkpoint
from executor_service.checkpoint.gguf_tokenizer import build_gguf_tokenizer
from executor_service.checkpoint.model_kind import takes_audio
from executor_service.errors import one_line
from executor_service.quantization import GgufFile
from executor_service.steps import TokenizerFile
from splitserve_common import check_file_name, parse_json, printable

_log = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_GENERATION = "generation_config.json"
# Old file of the chat template, saved by processors of multimodal models.
_OLD_TEMPLATE = "chat_template.json"
# Sources of vocabularies; log lines name the first that exists.
_SOURCES = (
    _TOKENIZER,
    "tekken*.json",
    "tokenizer.model",
    "*.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
)
_GGUF_NAMES = {"pad": "padding", "unk": "unknown"}
# Packages that transformers needs to read `*.model`, which holds either kind.
_PACKAGES = ("sentencepiece", "tiktoken")


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A tokenizer for clients. `files`: by the names that clients know.

    `eos_token_id`: None if the tokenizer has none.
    """

    files: Mapping[str, TokenizerFile] = field(default_factory=dict)
    eos_token_id: int | None = None


def read_tokenizer(checkpoint: Checkpoint, config: Any = None) -> ModelTokenizer:  # noqa: ANN401
    """Returns the tokenizer of `checkpoint`; one without files if none can be read.

    `config`: of `transformers`; None to read it. Models are served without a tokenizer, too; the
    log says why.
    """
    if checkpoint.gguf is not None:
        return _of_gguf(checkpoint.gguf)
    directory = checkpoint.directory
    source = _source(directory)
    if source is None:
        _log.info("tokenizer_missing directory=%s: prompts must be token ids", directory)
        return ModelTokenizer()
    files: dict[str, TokenizerFile] = dict(_usable(checkpoint.tokenizer_files))
    if config is not None and takes_audio(config) and (directory / _GENERATION).exists():
        # Clients of speech models need to know the tokens of languages and those never sampled.
        files[_GENERATION] = directory / _GENERATION
    settings = _read_object(directory / _CONFIG)
    declared = _content(settings.get("eos_token")) or _content(
        _read_object(directory / _SPECIAL_TOKENS).get("eos_token")
    )
    template = _old_template(directory)
    if template and _TEMPLATE not in files and not settings.get("chat_template"):
        files[_TEMPLATE] = template.encode()
    try:
        converted = _convert(directory, config)
    except Exception as error:  # of transformers, tokenizers and whatever reads the source
        return _as_it_is(files, source, declared, _reason(source, error))
    files[_TOKENIZER] = converted.backend_tokenizer.to_str().encode()
    special = {name: str(token) for name, token in converted.special_tokens_map.items()}
    files[_SPECIAL_TOKENS] = json.dumps(special, ensure_ascii=False).encode()
    if source != _TOKENIZER:
        kind = type(converted).__name__
        _log.info("tokenizer_converted source=%s class=%s", source, kind)
    eos_token = converted.eos_token
    # A default of a transformers class is not necessarily a token of the model.
    vocabulary = converted.backend_tokenizer.get_vocab(with_added_tokens=False)
    is_own = eos_token is not None and (eos_token == declared or eos_token in vocabulary)
    return ModelTokenizer(files, converted.eos_token_id if is_own else None)


def _of_gguf(gguf: GgufFile) -> ModelTokenizer:
    """Returns the tokenizer and the chat template that a GGUF file has."""
    if gguf.metadata.get("tokenizer.ggml.model") in (None, "none"):
        _log.info("tokenizer_missing file=%s: prompts must be token ids", gguf.paths[0].name)
        return ModelTokenizer()
    try:
        tokenizer = build_gguf_tokenizer(gguf.metadata)
    except Exception as error:  # the bindings raise nothing narrower
        _log.warning(
            "tokenizer_unreadable source=%s reason=%r: prompts must be token ids",
            gguf.paths[0].name,
            one_line(error),
        )
        return ModelTokenizer()
    files: dict[str, TokenizerFile] = {_TOKENIZER: tokenizer.to_str().encode()}
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    special = {
        f"{name}_token": tokens[gguf.metadata[key]]
        for name in ("bos", "eos", "pad", "unk")
        if (key := f"tokenizer.ggml.{_GGUF_NAMES.get(name, name)}_token_id") in gguf.metadata
    }
    files[_SPECIAL_TOKENS] = json.dumps(special, ensure_ascii=False).encode()
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files[_TEMPLATE] = template.encode()
    return ModelTokenizer(files)


def with_tokenizer_eos(
    eos_token_ids: tuple[int, ...], tokenizer: ModelTokenizer, vocab_size: int
) -> tuple[int, ...]:
    """Returns the tokens that end a sequence: those of the model, and that of its tokenizer.

    The configuration of some chat models does not name the token that ends their turns.
    """
    token_id = tokenizer.eos_token_id
    if token_id is None or token_id in eos_token_ids:
        return eos_token_ids
    if not 0 <= token_id < vocab_size:
        _log.warning(
            "tokenizer_eos_ignored token_id=%d: the model has %d tokens", token_id, vocab_size
        )
        return eos_token_ids
    _log.info("tokenizer_eos_added token_id=%d eos_token_ids=%s", token_id, list(eos_token_ids))
    return (*eos_token_ids, token_id)


def _convert(directory: Path, config: Any) -> Any:  # noqa: ANN401
    """Returns the tokenizer as `transformers` reads it. Raises any of its errors, and TypeError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer: Any = AutoTokenizer.from_pretrained(
        directory, config=config, local_files_only=True, trust_remote_code=False
    )
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        # With mistral-common installed, AutoTokenizer returns its class for tekken.json.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TypeError(f"{type(tokenizer).__name__} cannot be converted to {_TOKENIZER}")
    return tokenizer


def _as_it_is(
    files: dict[str, TokenizerFile], source: str, declared: str | None, reason: str
) -> ModelTokenizer:
    """Returns tokenizer.json unchanged, if it exists, with a warning.

    It is the fallback where `transformers` cannot read the tokenizer.
    """
    file = files.get(_TOKENIZER)
    if not isinstance(file, Path):
        _log.warning(
            "tokenizer_unreadable source=%s reason=%r: prompts must be token ids", source, reason
        )
        return ModelTokenizer()
    _log.warning("tokenizer_read_as_it_is source=%s reason=%r", source, reason)
    token_id: int | None = None
    if declared is not None:
        try:
            token_id = Tokenizer.from_file(str(file)).token_to_id(declared)
        except Exception as error:  # the bindings raise nothing narrower
            _log.warning("tokenizer_unreadable source=%s reason=%r", source, one_line(error))
    return ModelTokenizer(files, token_id)


def _reason(source: str, error: Exception) -> str:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if source.endswith(".model") and missing:
        return f"{one_line(error)}; not installed: {', '.join(missing)}"
    return one_line(error)


def _source(directory: Path) -> str | None:
    """Returns the name of the vocabulary's source; None if there is none."""
    found = (path.name for pattern in _SOURCES for path in sorted(directory.glob(pattern)))
    return next(found, None)


def _usable(files: Mapping[str, Path]) -> Iterable[tuple[str, Path]]:
    """Yields the files whose names may be shown; the name of a template is arbitrary."""
    for name, path in files.items():
        try:
            check_file_name(name)
        except ValueError as error:
            _log.warning("tokenizer_file_ignored name=%r reason=%r", printable(name), str(error))
        else:
            yield name, path


def _old_template(directory: Path) -> str | None:
    template = _read_object(directory / _OLD_TEMPLATE).get("chat_template")
    return template if isinstance(template, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _content(token: object) -> str | None:
    """Returns the content of a token entry (string or object); None for an empty entry."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
