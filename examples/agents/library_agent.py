"""The agent of `client_agent`, written with the library `openai-agents`, which does not know of the recording."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.exceptions import AgentsException
from client_agent import MOST_TURNS, product
from openai import AsyncOpenAI, DefaultAsyncHttpxClient


@function_tool
def calculator(expression: str) -> str:
    """The value of a product, as 12 * 34."""
    return str(product(expression))


async def solve(task: Any) -> str:
    """Answer with the help of a calculator; as in `client_agent`."""
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=http) as client:
        agent = Agent(
            name="calculating",
            tools=[calculator],
            model=OpenAIChatCompletionsModel(model=task.model, openai_client=client),
        )
        try:
            ended = await Runner.run(
                agent, list(task.messages), max_turns=MOST_TURNS, run_config=RunConfig(tracing_disabled=True)
            )
        except AgentsException:  # what the model did was wrong: a tool that there is not, too many turns
            return ""
    return str(ended.final_output)
