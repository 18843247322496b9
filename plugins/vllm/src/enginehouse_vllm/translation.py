"""Translates requests to vLLM's sampling parameters, and vLLM's outputs to results."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from enginehouse.engines.model import ModelSpec, end_ids
from enginehouse.engines.requests import check_request
from enginehouse.engines.rollout import Completion, GenerateRequest, GenerateResult, SamplingParams
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse_vllm.options import VLLMOptions

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine, CompletionOutput, RequestOutput
    from vllm.config import ModelConfig

LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above 0. vLLM raises lower temperatures to it, and only logs that."""


@dataclass(slots=True)
class RequestTranslator:
    """Translates requests to vLLM's sampling parameters, and vLLM's outputs to results.

    `has_exact_logprobs` is True if vLLM can note the probability of the tokens that top-k and top-p keep. `vocabulary`
    is the number of tokens, `ends` are the model's end-of-sequence tokens.
    """

    spec: ModelSpec
    options: VLLMOptions
    where: str
    has_exact_logprobs: bool
    vocabulary: int = 0
    max_model_tokens: int = 0
    ends: Sequence[int] = ()

    def learn(self, config: ModelConfig) -> None:
        """Read the number of tokens, the longest sequence and the end tokens from vLLM's config of the model."""
        self.vocabulary = config.get_vocab_size()
        self.max_model_tokens = config.max_model_len
        generation, text = config.try_get_generation_config(), config.hf_text_config
        self.ends = end_ids(generation.get("eos_token_id"), getattr(text, "eos_token_id", None))

    def check(self, request: GenerateRequest, llm: AsyncLLMEngine) -> None:
        """Raise `EnginehouseError` for a request that vLLM cannot serve."""
        check_request(request, self.vocabulary, self.max_model_tokens)
        sampling = request.sampling
        if sampling.max_tokens == 0 and len(request.prompt_ids) == self.max_model_tokens:
            raise EnginehouseError(
                f"request {request.id!r} scores a prompt of {len(request.prompt_ids)} tokens, the model's maximum, but "
                "vllm scores a prompt only if there is room for one more token. Shorten the prompt, or raise "
                "max_model_tokens."
            )
        if _is_truncated(sampling) and not self.has_exact_logprobs and self.options.truncated_logprobs == "exact":
            raise EnginehouseError(
                f"request {request.id!r} has top_p {sampling.top_p:g} and top_k {sampling.top_k}, with which Model "
                "Runner V2 of vllm gives logprobs within the kept tokens, not of the whole distribution. Use top_p=1 "
                "and top_k=0; or set VLLM_USE_V2_MODEL_RUNNER=0; or, if nothing uses the logprobs, set the option "
                "truncated_logprobs=renormalized."
            )
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise EnginehouseError(
                f"request {request.id!r} has temperature {sampling.temperature:g}, but vllm needs at least "
                f"{LOWEST_TEMPERATURE:g}, or 0 for greedy sampling."
            )
        if sampling.stop and llm.tokenizer is None:
            raise ModelError(f"stop strings need a tokenizer, and there is none in {self.spec.path!r}")

    def build_sampling(self, request: GenerateRequest, name: str) -> Any:
        """Return vLLM's sampling parameters. They have `extra_args` if kept probabilities are noted under `name`."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        ends = () if sampling.ignore_eos else self.ends
        seed = None if sampling.seed is None else _spread_seed(sampling.seed)
        extra = None
        if _is_truncated(sampling) and self.has_exact_logprobs and self.options.truncated_logprobs == "exact":
            from enginehouse_vllm.truncation import MARK

            extra = {MARK: name}
            seed = secrets.randbits(62) if seed is None else seed  # the notes of a sample are found by its seed
        return VLLMSamplingParams(
            n=sampling.n if sampling.temperature > 0 else 1,  # vLLM rejects several greedy samples
            max_tokens=max(sampling.max_tokens, 1),  # vLLM cannot score a prompt alone; the token is dropped
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            extra_args=extra,
            ignore_eos=True,  # the model's ends are among the stop tokens, so that they are the same for all engines
            stop_token_ids=[*ends, *sampling.stop_token_ids],
            stop=list(sampling.stop),
            detokenize=bool(sampling.stop),
            logprobs=0,
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def build_result(
        self, request: GenerateRequest, output: RequestOutput | None, served: int, cached: int | None = None
    ) -> GenerateResult:
        """Return the result of a request.

        Args:
            output: vLLM's output; None if the request was aborted before vLLM knew of it.
            served: Version for completions without tokens.
            cached: Oldest version of the keys and values that the request may have used; None: that of its first token
                is the oldest.
        """
        if output is None:
            return GenerateResult(request.id, (Completion((), (), "abort", served, served),) * request.sampling.n)
        prompt_logprobs = None
        if request.sampling.prompt_logprobs and output.prompt_logprobs is not None:
            prompt_logprobs = [0.0, *_first_of_each(output.prompt_logprobs)]
        completions = [self._build_completion(request, part, served) for part in output.outputs]
        if cached is not None:
            completions = [
                replace(completion, first_version=min(cached, completion.first_version)) for completion in completions
            ]
        if len(completions) == 1:  # greedy samples are all the same
            completions *= request.sampling.n
        return GenerateResult(request.id, tuple(completions), prompt_logprobs)

    def _build_completion(self, request: GenerateRequest, output: CompletionOutput, served: int) -> Completion:
        reason = output.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise EnginehouseError(f"{self.where}: vllm ended request {request.id!r} with {reason!r}")
        if request.sampling.max_tokens == 0:
            return Completion((), (), "abort" if reason == "abort" else "length", served, served)
        versions = [int(span.version) for span in output.weight_versions or ()] or [served]
        return Completion(list(output.token_ids), _first_of_each(output.logprobs), reason, versions[0], versions[-1])


def add_kept_probability(result: GenerateResult, kept: Mapping[str, Sequence[float]], seed: int) -> GenerateResult:
    """Turn logprobs within the kept tokens into logprobs of the whole distribution.

    Args:
        result: Logprobs within the kept tokens.
        kept: Logarithm of the kept tokens' probability at each token, by the seed of each sample.
        seed: Seed of the first sample; each further one has the next number.
    """
    completions = []
    for index, completion in enumerate(result.completions):
        masses = kept.get(str(seed + index), ())[: len(completion.logprobs)]
        logprobs = [logprob + mass for logprob, mass in zip(completion.logprobs, masses, strict=True)]
        completions.append(replace(completion, logprobs=logprobs))
    return replace(result, completions=tuple(completions))


def _first_of_each(logprobs: Any) -> list[float]:
    """Return the token's own logprob at each position that has one; vLLM lists it before other tokens' logprobs."""
    if logprobs is None:
        return []
    values = logprobs.logprobs
    return [
        values[begin] for begin, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True) if begin < end
    ]


def _is_truncated(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _spread_seed(seed: int) -> int:
    """Return a seed of 62 bits. vLLM adds the sample's index, so nearby seeds of requests must become distant ones."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little") >> 2
