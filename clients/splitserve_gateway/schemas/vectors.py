"""Request bodies of endpoints that return vectors, with the names of OpenAI, Cohere, Jina and vLLM.

They are embeddings, rankings, scores of pairs, classes, and vectors of any kind.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.config import JsonDict

from splitserve_gateway.schemas.base import (
    NULL_IS_DEFAULT,
    ApiRequest,
    ClientFields,
    Flag,
    Int32,
    Name,
    Refused,
    SchedulingFields,
    TokenIds,
    at_most,
    described,
    needs_one_of,
)
from splitserve_gateway.schemas.chat import (
    MAX_MESSAGES,
    ChatMessage,
    TemplateVariables,
    kind_of_prompt,
)

# As many as OpenAI takes.
MAX_INPUTS = 2048

_Many = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
_Text = Annotated[str, described(minLength=1)]
_Tokens = Annotated[TokenIds, described(minItems=1)]
_Inputs = Annotated[
    Annotated[_Text, Tag("<text>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Text], _Many, Tag("<texts>")]
    | Annotated[list[_Tokens], _Many, Tag("<lists>")],
    Discriminator(kind_of_prompt),
]
_Texts = Annotated[
    Annotated[_Text, Tag("<text>")] | Annotated[list[_Text], _Many, Tag("<texts>")],
    Discriminator(lambda value: "<texts>" if isinstance(value, list) else "<text>"),
]
_Positive = Annotated[Int32, Field(ge=1)]


class VectorFields(ClientFields, SchedulingFields):
    """Fields of all requests for vectors."""

    truncate_prompt_tokens: Annotated[Int32, Field(ge=-1)] | None = None
    use_activation: bool | None = None


class EmbeddingFields(VectorFields):
    """Fields of requests for embeddings."""

    add_special_tokens: Flag = True
    encoding_format: Annotated[Literal["float", "base64"], NULL_IS_DEFAULT] = "float"
    dimensions: _Positive | None = None
    normalize: bool | None = None
    prompt_name: Name | None = None


class EmbeddingRequest(EmbeddingFields):
    """Request body of `/v1/embeddings`."""

    input: _Inputs


class PoolingRequest(EmbeddingFields):
    """Request body of `/pooling`: `input`, or a chat."""

    model_config = ConfigDict(json_schema_extra=needs_one_of("input", "messages"))

    input: _Inputs | None = None
    messages: Annotated[list[ChatMessage], at_most(MAX_MESSAGES), described(minItems=1)] | None = (
        None
    )
    add_generation_prompt: Flag = False
    continue_final_message: Flag = False
    chat_template_kwargs: TemplateVariables | None = None
    task: Literal["embed", "classify"] | None = None


class ClassifyRequest(VectorFields):
    """Request body of `/classify`."""

    input: _Inputs
    add_special_tokens: Flag = True


class DocumentText(ApiRequest):
    """Document as an object."""

    text: _Text


def _kind_of_document(value: object) -> str:
    return "<object>" if isinstance(value, dict | DocumentText) else "<string>"


Document = Annotated[
    Annotated[_Text, Tag("<string>")] | Annotated[DocumentText, Tag("<object>")],
    Discriminator(_kind_of_document),
]


class RerankRequest(VectorFields):
    """Request body of `/v1/rerank` and `/v2/rerank`."""

    query: _Text
    documents: Annotated[list[Document], _Many]
    top_n: _Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: _Positive | None = None
    relevant_spans: Refused = None

    @property
    def texts(self) -> list[str]:
        """Documents as texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _given(*names: str) -> JsonDict:
    is_given: JsonDict = {"not": {"type": "null"}}
    return {"required": list(names), "properties": dict.fromkeys(names, is_given)}


class ScoreRequest(VectorFields):
    """Request body of `/score`: `text_1` and `text_2`, or `queries` and `documents`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_given("text_1", "text_2"), _given("queries", "documents")]}
    )

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
