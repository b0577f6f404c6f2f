"""Kinds of models: which return text, embeddings, classes or scores of pairs."""

from __future__ import annotations

from splitserve_client import Model, Pooling
from splitserve_gateway.http import invalid
from splitserve_gateway.upstreams import ServedByScheduler

_AUDIO_PATHS = "POST /v1/audio/transcriptions and POST /v1/audio/translations"


def generates(model: Model) -> bool:
    """Returns whether the model returns text for prompts alone."""
    return model.pooling is None and not transcribes(model)


def transcribes(model: Model) -> bool:
    """Returns whether the model returns the text of audio."""
    return model.encoder is not None and model.encoder.audio is not None


def pools(model: Model) -> bool:
    """Returns whether the model returns vectors."""
    return model.pooling is not None


def embeds(model: Model) -> bool:
    """Returns whether the model returns embeddings."""
    return model.pooling is not None and model.pooling.embedding_size > 0


def classifies(model: Model) -> bool:
    """Returns whether the model scores labels."""
    return model.pooling is not None and bool(model.pooling.labels)


def scores_pairs(model: Model) -> bool:
    """Returns whether the model scores pairs of texts with its only label."""
    return model.pooling is not None and len(model.pooling.labels) == 1


def compares(model: Model) -> bool:
    """Returns whether the model tells how well two texts match."""
    return embeds(model) or scores_pairs(model)


_PATHS = {
    "POST /v1/embeddings": embeds,
    "POST /v1/rerank": compares,
    "POST /score": compares,
    "POST /classify": classifies,
    "POST /pooling": pools,
}


def vector_paths(model: Model) -> str:
    """Returns the endpoints for a model that returns vectors, for errors."""
    return ", ".join(path for path, is_for in _PATHS.items() if is_for(model))


def check_generates(model: Model) -> None:
    """Raises ApiError if the model returns vectors instead of text, or takes audio."""
    if transcribes(model):
        raise invalid(f"the model {model.name!r} takes audio; allowed: {_AUDIO_PATHS}", "model")
    if not generates(model):
        what = f"the model {model.name!r} returns vectors and no text"
        raise invalid(f"{what}; allowed: {vector_paths(model)}", "model")


def pooling_of(served: ServedByScheduler) -> Pooling:
    """Returns the vectors that the model has. Raises ApiError if it returns text instead."""
    if served.model.pooling is None:
        message = f"the model {served.model.name!r} returns text and no vectors; allowed:"
        if transcribes(served.model):
            raise invalid(f"{message} {_AUDIO_PATHS}", "model")
        is_chat = served.tokenizer is not None and served.tokenizer.has_chat_template
        chats = (
            ", POST /v1/chat/completions, POST /v1/responses, POST /v1/messages" if is_chat else ""
        )
        raise invalid(f"{message} POST /v1/completions{chats}", "model")
    return served.model.pooling
