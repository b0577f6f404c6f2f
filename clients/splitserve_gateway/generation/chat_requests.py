"""From a chat to what text is generated from, and how that text is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from splitserve_client import SamplingParams
from splitserve_gateway.generation.answers import answer_plan, tools_of
from splitserve_gateway.generation.chat_prompts import chat_of_tokens, content_of, encode_chat
from splitserve_gateway.generation.choices import TextRequest
from splitserve_gateway.generation.field_names import FieldNames
from splitserve_gateway.generation.prompts import EncodedPrompt, truncated
from splitserve_gateway.generation.serving import Serving, tokenizer_of
from splitserve_gateway.generation.text_requests import text_request
from splitserve_gateway.grammars.answer_plan import AnswerPlan
from splitserve_gateway.schemas.chat import ChatRequest
from splitserve_gateway.upstreams.upstream import Served


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """`final_message`: the text that the answer continues, if it does."""

    asked: TextRequest
    plan: AnswerPlan
    final_message: str = ""


async def chat_generation(
    serving: Serving, body: ChatRequest, params: SamplingParams, fields: FieldNames
) -> ChatGeneration:
    """The generation that a chat asks for; `fields`: what its caller calls them.

    Raises ApiError and SplitserveError.
    """
    use = await tools_of(body)
    prompt = await _prompt(body, serving.served, use.template_tools)
    plan = await answer_plan(serving, body, use, prompt.text)
    params = replace(params, grammar=plan.grammar)
    asked = await text_request(serving, body, params, [prompt], fields)
    skips = body.skip_special_tokens and not plan.shows_markers
    rules = replace(asked.rules, skip_special_tokens=skips)
    return ChatGeneration(replace(asked, rules=rules), plan, _final_message(body))


async def _prompt(
    body: ChatRequest, served: Served, tools: list[Mapping[str, object]] | None
) -> EncodedPrompt:
    if body.prompt_token_ids is None:
        return await encode_chat(body, served, tools, body.truncate_prompt_tokens)
    token_ids = truncated(body.prompt_token_ids, body.truncate_prompt_tokens, served)
    return chat_of_tokens(token_ids, tokenizer_of(served))


def _final_message(body: ChatRequest) -> str:
    if not body.continue_final_message or not body.messages:
        return ""
    content = content_of(body.messages[-1])
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
