"""The score of a reward model that a server of vLLM's or SGLang's answers for."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any, Literal

from enginehouse_rewards.program import TIMEOUT

SHARE = 0.9
"""Of the time for a row, what a server has to answer in: who asks it then says so, and leaves no thread behind."""

ANSWER_BYTES = 2**20
"""How long an answer may be; a score's has some hundred bytes."""


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
    """Return what a server answers to a POST of JSON."""
    request = urllib.request.Request(place, json.dumps(body).encode(), {"Content-Type": "application/json"})
    limit = SHARE * float(os.environ.get(TIMEOUT, "60"))
    until, text = time.monotonic() + limit, bytearray()
    try:
        with urllib.request.urlopen(request, timeout=limit) as answer:
            while piece := answer.read1(2**16):
                text += piece
                if len(text) > ANSWER_BYTES:
                    raise ValueError(f"its answer is longer than {ANSWER_BYTES} bytes")
                if time.monotonic() > until:
                    raise TimeoutError(f"its answer did not end within {limit:.3g} s")
        return json.loads(text)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace")
        raise RuntimeError(f"{place} refuses with status {error.code}: {said}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{place} cannot be asked: {error}") from error
