"""The score of a reward model that a server of vLLM's or SGLang's answers for."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any, Literal


async def served(
    prompt: str, response: str, *, url: str, server: Literal["vllm", "sglang"] = "vllm", ending: str = ""
) -> float:
    """Return the score of prompt and response together, as the model's head gives it, without an activation.

    Args:
        prompt: as the policy read it.
        response: its text.
        url: the server's, `http://host:8000`; its `/classify` is asked. vLLM serves a reward model by
            `vllm serve MODEL --runner pooling`, SGLang by `launch_server --model-path MODEL --is-embedding`.
        server: whose form of request and answer it has.
        ending: text put after the response, as the end of a turn in the model's chat template.

    Raises:
        RuntimeError: the server refuses, is not there, or answers something else; it names the URL.
    """
    text = prompt + response + ending
    body = {"input": text, "use_activation": False} if server == "vllm" else {"text": text}
    place = url.rstrip("/") + "/classify"
    answer = await asyncio.to_thread(_asked, place, body)
    try:
        scores = answer["data"][0]["probs"] if server == "vllm" else answer["embedding"]
        (score,) = scores
        return float(score)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        shown = json.dumps(answer)[:200]
        raise RuntimeError(
            f"{place} answered no single score, as a reward model of {server}'s would: {shown}"
        ) from error


def _asked(place: str, body: dict[str, Any]) -> Any:
    """What a server answers to a POST of JSON; the reward pool says how long it may take."""
    request = urllib.request.Request(place, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace")
        raise RuntimeError(f"{place} refuses with status {error.code}: {said}") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{place} cannot be asked: {error}") from error
