"""Calls of Pydantic AI, through both of OpenAI's APIs."""

from __future__ import annotations

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, Weather, get_weather, report

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key=API_KEY)
MODELS = [api(MODEL, provider=PROVIDER) for api in (OpenAIChatModel, OpenAIResponsesModel)]


def tools() -> None:
    for model in MODELS:
        agent = Agent(model, instructions="Be brief.", tools=[get_weather])
        first = agent.run_sync("hi")
        agent.run_sync("more", message_history=first.all_messages())


def structured() -> None:
    for model in MODELS:
        for output in (ToolOutput(Weather), NativeOutput(Weather)):
            Agent(model, output_type=output).run_sync("hi")


async def streamed() -> None:
    for model in MODELS:
        async with Agent(model).run_stream("hi") as answer:
            await answer.get_output()


if __name__ == "__main__":
    report(tools, structured, streamed)
