"""An example agent that needs only the package `openai`.

It sends a question and a calculator tool to the model, runs the calls of the answer, and repeats this until an answer
has no calls.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from enginehouse_environments.builtin_tools.calculator import calculator

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from enginehouse_environments.agents import AgentTask

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "calculator", "parameters": EXPRESSION}}]


async def calculate(task: AgentTask, most_calls: int = 2) -> str:
    """Answer a question with a calculator.

    Args:
        task: the question, and the endpoint through which the agent uses the model.
        most_calls: maximum number of requests to the model.
    """
    client = _make_client(task.base_url).with_options(api_key=task.api_key)
    messages: list[Any] = list(task.messages)
    for _ in range(most_calls):
        completion = await client.chat.completions.create(model=task.model, messages=messages, tools=TOOLS)
        answer = completion.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            result = _call(call.function.arguments) if call.type == "function" else "there is no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def _call(arguments: str) -> str:
    try:
        return calculator(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        return f"error: {error}"


@lru_cache(maxsize=1)
def _make_client(base_url: str) -> AsyncOpenAI:
    """Return the client that all episodes share, so that connections are reused and certificates are read only once."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="given by each task")
