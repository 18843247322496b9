"""Samples tokens from logits, with one uniform number per token.

The uniforms come from a counter. They depend only on (seed, sample, position), so a seeded completion is the same
whatever else runs in the batch.
"""

from __future__ import annotations

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LARGEST_UNIFORM = 1 - 2.0**-23  # its product with a float32 total is below the total, so no draw falls off the end


def streams(seeds: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Start a SplitMix64 stream (Steele et al. 2014) for each (seed, sample), both uint64; return uint64."""
    return _mix(_mix(seeds + GOLDEN) + samples * GOLDEN)


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return each stream's number at `positions`, the count of tokens sampled before: float32 in [0, 1)."""
    bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    fractions = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.minimum(fractions, LARGEST_UNIFORM).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token from each row of logits by inverting its distribution function.

    Args:
        logits: `(rows, vocabulary)` float32.
        uniforms: `(rows,)` float32 in [0, 1).
        temperature: `(rows,)` float32, 0 for greedy; None: all 1.
        top_k: `(rows,)` int64, 0 keeps all tokens; None: all 0. Ties are broken towards the lower id.
        top_p: `(rows,)` float32, applied to what top-k keeps; None: all 1.

    Returns:
        Tokens `(rows,)` int64, and their logprobs `(rows,)` float32 under `logits / temperature` over the whole
        vocabulary, with temperature 1 where it is 0.
    """
    if temperature is not None:
        greedy = temperature == 0
        logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    probabilities = torch.softmax(logits, -1)
    weights = probabilities if top_k is None and top_p is None else _truncate(probabilities, top_k, top_p)
    distribution = weights.cumsum(-1)
    tokens = torch.searchsorted(distribution, uniforms[:, None] * distribution[:, -1:], right=True)
    tokens.clamp_(max=logits.shape[1] - 1)  # logits that are not finite must not index beyond the vocabulary
    if temperature is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    # softmax's own sum drifts by 1e-5 over 49,152 tokens, and always to one side; sum() adds in pairs.
    return tokens[:, 0], (probabilities.gather(1, tokens) / probabilities.sum(-1, keepdim=True)).log_()[:, 0]


def _truncate(probabilities: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Zero the tokens that top-k, then top-p, leave out; do not renormalise."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(ordered.shape[1], device=ordered.device)
        ordered = ordered * ((rank < top_k[:, None]) | (top_k[:, None] == 0))
    if top_p is not None:
        reached = ordered.cumsum(-1)
        allowed = torch.where(top_p < 1, top_p, torch.inf)[:, None] * reached[:, -1:]
        ordered = ordered * (reached - ordered < allowed)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


def prompt_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the logprob of each token given the tokens before it, 0 for the first.

    Args:
        logits: `(rows, tokens, vocabulary)` float32.
        tokens: `(rows, tokens)` int64.
        temperature: `(rows,)` float32, 0 counts as 1.

    Returns:
        `(rows, tokens)` float32.
    """
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    scaled = logits[:, :-1] / scale
    scored = scaled.gather(2, tokens[:, 1:, None])[:, :, 0] - scaled.logsumexp(-1)  # log_softmax drifts, see `draw`
    return torch.cat((scored.new_zeros((tokens.shape[0], 1)), scored), 1)
