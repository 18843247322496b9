"""A client of an OpenAI-compatible endpoint, of the standard library alone."""

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

SECONDS = 120.0
"""Longest an answer may take."""


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """What is answered to a GET, or to a POST of `body`; a status that is no success is a `urllib.error.HTTPError`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def complete(url: str, prompt: Sequence[int], tokens: int) -> list[int]:
    """The token ids of a greedy completion of token ids."""
    model = ask(f"{url}/models")["data"][0]["id"]
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return ask(f"{url}/completions", {**body, "return_token_ids": True})["choices"][0]["token_ids"]
