"""Registers environments of several turns."""

from __future__ import annotations

from enginehouse.plugin import Environment, hookimpl

enginehouse_protocol = "1.1"

ENVIRONMENTS: dict[str, tuple[str, str]] = {
    "guessing_game": ("games:GuessingGame", "Guess a number in two turns, with a hint between them"),
    "gym": ("gym:Gym", "A reset/step environment of gymnasium in a chat, an action a turn"),
    "tools": ("tools:Tools", "A chat in which the policy may call tools: functions of yours, and some built in"),
    "openai_agent": ("agents:OpenAIAgent", "An agent of yours that asks the policy through an OpenAI endpoint"),
    "reasoning_gym": ("reasoning_gym:ReasoningGym", "Tasks of the package reasoning_gym by name, by its own scorers"),
    "verifiers": ("verifiers:Verifiers", "A taskset of the package verifiers, by its own harness and rewards"),
}
"""Class, as `"module:Class"`, and summary of each environment, by name."""


@hookimpl
def enginehouse_register_environments(register):
    for name, (environment, summary) in ENVIRONMENTS.items():
        register(Environment(name=name, summary=summary, environment=f"enginehouse_environments.{environment}"))
