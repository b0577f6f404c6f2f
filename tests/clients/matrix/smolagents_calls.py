"""Calls of smolagents."""

from __future__ import annotations

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tests.clients.matrix.checks import API_KEY, BASE_URL, MODEL, get_weather, report

MODEL_OF_AGENTS = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=API_KEY)


def tools() -> None:
    for kind in (ToolCallingAgent, CodeAgent):
        agent = kind(
            tools=[tool(get_weather)], model=MODEL_OF_AGENTS, max_steps=2, verbosity_level=0
        )
        agent.run("hi")


if __name__ == "__main__":
    report(tools)
