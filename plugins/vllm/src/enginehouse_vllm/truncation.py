"""Notes, in vLLM's worker processes, how much of the distribution top-k and top-p keep.

vLLM's `processed_logprobs` are logprobs within the kept tokens. Adding the logarithm of the kept tokens' probability,
one number for each token, gives logprobs of the whole distribution. This module notes the number when a token is
sampled; the engine collects it when the request is done. Only Model Runner V1 can run code between the temperature and
the cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

MARK = "enginehouse_truncated"
"""Key in `SamplingParams.extra_args` of the requests to take notes of; the value is the request's name."""

_notes: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
"""Logarithms of the kept probability by request, seed of the sample, position of the token."""


class NotesKeptProbability(AdapterLogitsProcessor):
    """A logits processor that changes nothing. vLLM calls it after the temperature and before the cut."""

    def is_argmax_invariant(self) -> bool:
        """Return True, so that vLLM does not call this processor for greedy requests."""
        return True

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """Return the function that gets a sample's logits, if its request is marked."""
        name = (params.extra_args or {}).get(MARK)
        if name is None:
            return None
        return partial(_note, _notes[name][params.seed or 0], params.top_k, params.top_p)


def _note(notes: dict[int, float], top_k: int, top_p: float, drawn: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Note how much of the distribution of `logits` `(vocabulary,)` top-k and top-p keep for the next token."""
    k = torch.tensor([top_k], device=logits.device) if top_k > 0 else None
    p = torch.tensor([top_p], device=logits.device) if top_p < 1 else None
    cut = apply_top_k_top_p(logits[None].clone(), k, p)[0]
    notes[len(drawn)] = float(torch.logsumexp(cut, 0) - torch.logsumexp(logits, 0))
    return logits


class WorkerExtension:
    """Methods that vLLM's worker inherits, for `collective_rpc`."""

    def enginehouse_take_kept(self, name: str) -> dict[str, list[float]]:
        """Return and forget the notes of a request: a number for each token, by the seed of each sample."""
        samples = _notes.pop(name, {})
        return {str(seed): [notes[position] for position in sorted(notes)] for seed, notes in samples.items()}
