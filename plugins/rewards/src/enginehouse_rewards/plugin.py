"""Registers the built-in rewards."""

from __future__ import annotations

from enginehouse.plugin import Reward, hookimpl

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_rewards(register):
    for name, summary in {
        "code": "Runs the response's program against tests, in a sandbox",
        "exact_match": "1 where the response is the answer, else 0",
        "format": "1 where the response matches a regular expression, else 0",
        "length": "0 to -1 for a response that is too long (Yu et al. 2025), or differs from a wanted length",
        "math": "1 where the response's answer, in LaTeX or plain, equals the data's, by math-verify",
        "numeric": "1 where the response's number is the answer's, as for GSM8K, else 0",
        "served": "The score of a reward model that is served by vLLM or SGLang",
    }.items():
        register(Reward(name=name, summary=summary, function=f"enginehouse_rewards.builtin.{name}:{name}"))
