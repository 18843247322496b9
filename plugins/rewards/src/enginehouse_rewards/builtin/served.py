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
"""Fraction of a row's time limit in which the server must answer, so that no thread is left behind."""

ANSWER_BYTES = 2**20
"""Maximum length of a reply in bytes; a score has some hundred."""


async def served(
    prompt: str, response: str, *, url: str, server: Literal["vllm", "sglang"] = "vllm", ending: str = ""
) -> float:
    """Return the score that a reward model on a vLLM or SGLang server gives to prompt and response, without an
    activation.

    Args:
        prompt: prompt as the policy read it.
        response: text of the response.
        url: URL of the server, `http://host:8000`; requests go to its `/classify`. Start vLLM with `vllm serve MODEL
            --runner pooling`, and SGLang with `launch_server --model-path MODEL --is-embedding`.
        server: the server's type, which sets the form of request and reply.
        ending: text added after the response, such as the end of a turn in the model's chat template.

    Raises:
        RuntimeError: the server rejects the request, cannot be reached, or replies with something else; the message
            names the URL.
    """
    text = prompt + response + ending
    body = {"input": text, "use_activation": False} if server == "vllm" else {"text": text}
    address = url.rstrip("/") + "/classify"
    reply = await asyncio.to_thread(_post, address, body)
    try:
        scores = reply["data"][0]["probs"] if server == "vllm" else reply["embedding"]
        (score,) = scores
        return float(score)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        shown = json.dumps(reply)[:200]
        raise RuntimeError(
            f"{address} must return a single score, as a reward model on {server} does, not {shown}"
        ) from error


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    limit = SHARE * float(os.environ.get(TIMEOUT, "60"))
    until, text = time.monotonic() + limit, bytearray()
    try:
        with urllib.request.urlopen(request, timeout=limit) as reply:
            while piece := reply.read1(2**16):
                text += piece
                if len(text) > ANSWER_BYTES:
                    raise ValueError(f"its answer is longer than {ANSWER_BYTES} bytes")
                if time.monotonic() > until:
                    raise TimeoutError(f"its answer did not end within {limit:.3g} s")
        return json.loads(text)
    except urllib.error.HTTPError as error:
        reason = error.read(300).decode(errors="replace")
        raise RuntimeError(f"{address} rejected the request with status {error.code}: {reason}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"the request to {address} failed: {error}") from error
