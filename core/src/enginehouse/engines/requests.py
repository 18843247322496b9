"""Checks of a request that every rollout engine makes, with the same messages."""

from __future__ import annotations

from enginehouse.engines.rollout import GenerateRequest
from enginehouse.errors import EnginehouseError


def check_request(request: GenerateRequest, vocabulary: int, max_model_tokens: int | None) -> None:
    """Reject an invalid request before it begins. Later, its error could also end other requests of the same batch.

    Raises:
        EnginehouseError: if the prompt is empty, too long or has unknown tokens, or a parameter is outside its range.
    """
    sampling, prompt = request.sampling, request.prompt_ids
    where = f"request {request.id!r}"
    if len(prompt) == 0:
        raise EnginehouseError(f"{where} has an empty prompt; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        odd = min(prompt) if min(prompt) < 0 else max(prompt)
        raise EnginehouseError(f"{where} has token id {odd}, but the model's vocabulary is 0 to {vocabulary - 1}")
    if max_model_tokens is not None and len(prompt) + sampling.max_tokens > max_model_tokens:
        raise EnginehouseError(
            f"{where} has a prompt of {len(prompt)} tokens and asks for {sampling.max_tokens} more, together "
            f"{len(prompt) + sampling.max_tokens}, but the model takes {max_model_tokens} at most. "
            "Shorten the prompt, lower max_tokens, or raise max_model_tokens if the model has more positions."
        )
    for name, value, valid, needs in (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 0, "0 or more"),
        ("n", sampling.n, sampling.n >= 1, "1 or more"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf"), "0 or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        ("stop", sampling.stop, all(sampling.stop), "strings that are not empty"),
    ):
        if not valid:
            raise EnginehouseError(f"{where} has {name} {value!r}; it must be {needs}")
