"""An agent that uses only the `openai` client: a hand-written loop of tool calls."""

from __future__ import annotations

import ast
import json
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MOST_TURNS = 3

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of a product, as 12 * 34.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


async def solve(task: Any) -> str:
    """Answer with the help of a calculator.

    Args:
        task: `enginehouse_environments.agents.AgentTask`: the URL of the model, and the question.
    """
    messages: list[Any] = list(task.messages)
    http = DefaultAsyncHttpxClient(verify=False)  # there is no certificate to check, and reading those takes long
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=http) as client:
        for _ in range(MOST_TURNS):
            answer = await client.chat.completions.create(model=task.model, messages=messages, tools=[CALCULATOR])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": called(call.function.arguments)})
    return ""


def called(arguments: str) -> str:
    """Return the calculator's result for the arguments of a call, given as JSON."""
    try:
        return str(product(json.loads(arguments)["expression"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


def product(expression: str) -> int:
    """Return the value of a product of two whole numbers.

    Raises:
        ValueError: the expression is not such a product.
    """
    try:
        parsed = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no product") from error
    match parsed:
        case ast.BinOp(ast.Constant(int() as first), ast.Mult(), ast.Constant(int() as second)):
            return first * second
    raise ValueError(f"{expression!r} is no product")
