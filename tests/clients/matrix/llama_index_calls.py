"""Calls of LlamaIndex."""

from __future__ import annotations

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, Weather, get_weather, report

LLM = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key=API_KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)


def chat() -> None:
    LLM.chat([ChatMessage(role="user", content="hi")])
    list(LLM.stream_chat([ChatMessage(role="user", content="hi")]))


def structured() -> None:
    LLM.structured_predict(Weather, PromptTemplate("hi"))


async def tools() -> None:
    await FunctionAgent(tools=[get_weather], llm=LLM, system_prompt="Be brief.").run("hi")


def embeddings() -> None:
    made = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE_URL, api_key=API_KEY)
    made.get_text_embedding_batch(["t1", "t2"])


if __name__ == "__main__":
    report(chat, structured, tools, embeddings)
