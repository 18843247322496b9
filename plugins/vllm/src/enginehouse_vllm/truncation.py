"""Logprobs of the whole distribution where top-k or top-p cut it; runs in vLLM's worker processes.

vLLM's `processed_logprobs` are those of the tokens that were kept. What is missing to the whole distribution is the
logarithm of the kept tokens' probability, one number a token: noted here when the token is drawn, and asked for when
its request is done. Model Runner V1 only: V2 has no place for it between the temperature and the cut.
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
"""Key in `SamplingParams.extra_args` of the requests to take notes of; its value is the request's name."""

_notes: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
"""Logarithms of the kept probability by request, seed of the sample, position of the token."""


class NotesKeptProbability(AdapterLogitsProcessor):
    """A logits processor that changes nothing. It is called after the temperature and before the cut."""

    def is_argmax_invariant(self) -> bool:
        """Yes: and so it is not called for greedy requests."""
        return True

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        """The function that looks at one sample's logits, for a request that is marked."""
        name = (params.extra_args or {}).get(MARK)
        if name is None:
            return None
        return partial(_note, _notes[name][params.seed or 0], params.top_k, params.top_p)


def _note(noted: dict[int, float], top_k: int, top_p: float, drawn: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Note how much of the distribution of `logits` `(vocabulary,)` top-k and top-p keep for the next token."""
    k = torch.tensor([top_k], device=logits.device) if top_k > 0 else None
    p = torch.tensor([top_p], device=logits.device) if top_p < 1 else None
    kept = apply_top_k_top_p(logits[None].clone(), k, p)[0]
    noted[len(drawn)] = float(torch.logsumexp(kept, 0) - torch.logsumexp(logits, 0))
    return logits


class WorkerExtension:
    """Methods that vLLM's worker gets, for `collective_rpc`."""

    def enginehouse_take_kept(self, name: str) -> dict[str, list[float]]:
        """What was noted of a request, by the seed of each sample, a number a token; it is forgotten here."""
        samples = _notes.pop(name, {})
        return {str(seed): [noted[position] for position in sorted(noted)] for seed, noted in samples.items()}
