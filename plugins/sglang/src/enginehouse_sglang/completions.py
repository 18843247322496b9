"""From requests to rows of SGLang's `/generate`, and from its answers to completions."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginehouse.engines.rollout import Completion, GenerateRequest, GenerateResult, SamplingParams
from enginehouse.errors import EnginehouseError
from enginehouse_sglang.labels import Labels


@dataclass(slots=True)
class PendingCompletion:
    """One completion on its way.

    Attributes:
        rid: what SGLang knows it by.
        prompt: token ids of the prompt.
        seed: of this completion; None: not seeded.
        tokens: drawn so far.
        logprobs: one for each of them.
        versions: weight versions they were drawn from, the first and the last.
        reason: why it ended, once it has.
        prompt_logprobs: if asked for and known.
        begun: how often it was handed to SGLang.
        aborted: whether it is to end, as somebody here asked.
    """

    rid: str
    prompt: list[int]
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = ""
    prompt_logprobs: list[float] | None = None
    begun: int = 0
    aborted: bool = False

    def row(self, sampling: SamplingParams, ends: frozenset[int]) -> dict[str, Any]:
        """What SGLang is asked for: all of it, or what is still missing.

        Args:
            sampling: of the request.
            ends: tokens that end it.
        """
        asked: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens - len(self.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # Without stop tokens of ours SGLang must heed none of its own; with some, it cannot be told not to.
            "ignore_eos": not ends,
            "stop_token_ids": sorted(ends),
        }
        if sampling.stop:
            asked["stop"] = list(sampling.stop)
        if self.seed is not None:
            asked["sampling_seed"] = self.seed
        self.begun += 1
        scored = sampling.prompt_logprobs and self.prompt_logprobs is None
        return {
            "rid": f"{self.rid}-{self.begun}",
            "input_ids": self.prompt + self.tokens,
            "sampling_params": asked,
            "logprob_start_len": 0 if scored else -1,
        }

    def take(
        self, answer: Mapping[str, Any], sampling: SamplingParams, ends: frozenset[int], labels: Labels, served: int
    ) -> bool:
        """Take SGLang's answer to a row; returns whether the completion has ended.

        SGLang stops at ends of the tokenizer and of the model that are not those of the request: it is then asked to go
        on, which gives the tokens it would have given, as a seeded draw depends on the place in the sequence.

        Raises:
            EnginehouseError: SGLang could not draw it; or somebody else ended it, or changed the weights.
        """
        about = answer["meta_info"]
        tokens = list(answer["output_ids"])[: max(sampling.max_tokens - len(self.tokens), 0)]
        self.tokens += tokens
        self.logprobs += [entry[0] for entry in about["output_token_logprobs"][: len(tokens)]]
        spans = [span["version"] for span in about.get("weight_versions") or () if span["end"] > span["start"]]
        self.versions += [labels.number(label) for label in (spans[:1] + spans[-1:])] if tokens else []
        if sampling.prompt_logprobs and self.prompt_logprobs is None and about.get("input_token_logprobs"):
            self.prompt_logprobs = [0.0, *(entry[0] for entry in about["input_token_logprobs"][1 : len(self.prompt)])]
        finish = about["finish_reason"]
        self.reason = finish["type"]
        if self.reason == "abort" and (finish.get("err_type") or not self.aborted):
            said = finish.get("message") or "somebody else aborted it"
            raise EnginehouseError(f"sglang did not serve request {self.rid}: {said}")
        if self.reason not in ("stop", "length", "abort"):
            raise EnginehouseError(f"sglang ended request {self.rid} with {self.reason!r}")
        matched = finish.get("matched")
        if self.reason == "stop" and isinstance(matched, str) and matched not in sampling.stop:  # such as not a number
            raise EnginehouseError(f"sglang could not serve request {self.rid}: {matched}")
        foreign = self.reason == "stop" and isinstance(matched, int) and matched not in ends
        if foreign and len(self.tokens) < sampling.max_tokens:
            return False
        if foreign:
            self.reason = "length"
        self.end(self.reason, served)
        return True

    def end(self, reason: str, served: int) -> None:
        """It has ended; without tokens it counts for the version that is served."""
        self.reason, self.versions = reason, self.versions or [served]

    def completion(self) -> Completion:
        """What came of it."""
        reason: Any = self.reason
        return Completion(self.tokens, self.logprobs, reason, self.versions[0], self.versions[-1])


def drawings(request: GenerateRequest, rid: str) -> list[PendingCompletion]:
    """The completions of a request: `n` of them, each with a seed of its own; one, where all would be the same.

    SGLang gives all samples of a seeded request the same tokens, so each is a request of its own to it, by the name of
    `rid` and its number.
    """
    sampling = request.sampling
    prompt = list(request.prompt_ids)
    n = sampling.n if sampling.temperature > 0 and sampling.max_tokens > 0 else 1
    return [PendingCompletion(f"{rid}-{number}", prompt, _seed(sampling.seed, number)) for number in range(n)]


def _seed(seed: int | None, number: int) -> int:
    """A seed of 62 bits for each sample. Where none is given it is drawn: SGLang's own default is one for all."""
    if seed is None:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 2


def result(request: GenerateRequest, drawn: Sequence[PendingCompletion]) -> GenerateResult:
    """A request's result from its completions."""
    completions = tuple(one.completion() for one in drawn)
    if len(completions) == 1:  # greedy samples are all the same
        completions *= request.sampling.n
    return GenerateResult(request.id, completions, drawn[0].prompt_logprobs)
