"""Translates requests to rows, and SGLang's answers to completions.

A *row* is one sequence in an HTTP request to SGLang's `/generate`: token ids to continue, and sampling parameters.
"""

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
    """One completion that SGLang is to generate, with the tokens generated so far.

    Attributes:
        versions: Weight versions of the first and the last token of each answer.
        cached: Weight version whose cached keys and values its first row may use.
        kept: True if its keys and values were kept over a weight update.
        reason: Finish reason; None until the completion ends.
        rows: Number of rows that were sent to SGLang for this completion.
        aborted: True if this engine was asked to abort the completion.
    """

    rid: str
    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int | None = None
    kept: bool = False
    reason: Any = None
    prompt_logprobs: list[float] | None = None
    rows: int = 0
    aborted: bool = False

    @property
    def row_id(self) -> str:
        """Id by which SGLang knows the newest row."""
        return f"{self.rid}-{self.rows}"

    def build_row(
        self, sampling: SamplingParams, ends: frozenset[int], labels: Labels, served: int, adapter: str | None
    ) -> dict[str, Any]:
        """Build the row that asks SGLang for the missing tokens.

        Args:
            ends: Tokens that end the completion.
            served: Weight version. The row uses only cached keys and values of rows that were sent at this version.
            adapter: SGLang's name for the adapter of the row; None: no adapter.
        """
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens - len(self.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # If we pass stop tokens, SGLang also uses its own; if we pass none, it must use none.
            "ignore_eos": not ends,
            "stop_token_ids": sorted(ends),
            "sampling_seed": self.seed,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        self.rows += 1
        self.cached = served if self.cached is None else self.cached
        scores_prompt = sampling.prompt_logprobs and self.prompt_logprobs is None
        row = {
            "rid": self.row_id,
            "input_ids": self.prompt + self.tokens,
            "sampling_params": parameters,
            "logprob_start_len": 0 if scores_prompt else -1,
            "extra_key": labels.label(served),
        }
        return row if adapter is None else row | {"lora_path": adapter}

    def take(
        self, answer: Mapping[str, Any], sampling: SamplingParams, ends: frozenset[int], labels: Labels, served: int
    ) -> bool:
        """Take SGLang's answer to a row and return True if the completion has ended.

        SGLang also stops at end tokens of the tokenizer and the model that the request does not name. The completion
        has then not ended, and the caller sends another row, which continues after the end token. The row gives the
        same tokens as if SGLang had not stopped, because SGLang samples each token by the seed and the token's position
        in the sequence.

        Raises:
            EnginehouseError: SGLang could not generate the completion, or another client ended it or changed the
                weights.
        """
        info = answer["meta_info"]
        tokens = list(answer["output_ids"])[: max(sampling.max_tokens - len(self.tokens), 0)]
        self.tokens += tokens
        self.logprobs += [entry[0] for entry in info["output_token_logprobs"][: len(tokens)]]
        spans = [span["version"] for span in info.get("weight_versions") or () if span["end"] > span["start"]]
        self.versions += [labels.number(label) for label in (spans[:1] + spans[-1:])] if tokens else []
        if sampling.prompt_logprobs and self.prompt_logprobs is None and info.get("input_token_logprobs"):
            self.prompt_logprobs = [0.0, *(entry[0] for entry in info["input_token_logprobs"][1 : len(self.prompt)])]
        finish = info["finish_reason"]
        reason, matched = finish["type"], finish.get("matched")
        if reason == "abort" and (finish.get("err_type") or not self.aborted):
            message = finish.get("message") or "another client aborted it"
            raise EnginehouseError(f"sglang did not serve request {self.rid}: {message}")
        if reason not in ("stop", "length", "abort"):
            raise EnginehouseError(f"sglang ended request {self.rid} with {reason!r}")
        if reason == "stop" and isinstance(matched, str) and matched not in sampling.stop:  # such as not a number
            raise EnginehouseError(f"sglang could not serve request {self.rid}: {matched}")
        if reason == "stop" and isinstance(matched, int) and matched not in ends:
            if len(self.tokens) < sampling.max_tokens:
                return False
            reason = "length"
        self.end(reason, served)
        return True

    def end(self, reason: str, served: int) -> None:
        """Set the finish reason. A completion without tokens gets the served version as its weight version."""
        self.reason, self.versions = reason, self.versions or [served]
        if self.kept and self.cached is not None:
            self.versions.insert(0, self.cached)


def split_request(request: GenerateRequest, rid: str) -> list[PendingCompletion]:
    """Return the `n` completions of a request, each with its own seed; only one completion if all would be the same.

    Each completion is a separate row, because SGLang gives all samples of one row the same tokens if the row has a
    seed.
    """
    sampling = request.sampling
    prompt = list(request.prompt_ids)
    n = sampling.n if sampling.temperature > 0 and sampling.max_tokens > 0 else 1
    return [PendingCompletion(f"{rid}-{number}", prompt, _derive_seed(sampling.seed, number)) for number in range(n)]


def _derive_seed(seed: int | None, number: int) -> int:
    """Return a seed of 62 bits for a sample. If `seed` is None it is random, because SGLang's default seed is a
    constant."""
    if seed is None:
        return secrets.randbits(62)
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 2


def join_completions(request: GenerateRequest, pending: Sequence[PendingCompletion]) -> GenerateResult:
    """Make a request's result of its ended completions."""
    completions = tuple(
        Completion(
            completion.tokens, completion.logprobs, completion.reason, completion.versions[0], completion.versions[-1]
        )
        for completion in pending
    )
    if len(completions) == 1:  # greedy samples are all the same
        completions *= request.sampling.n
    return GenerateResult(request.id, completions, pending[0].prompt_logprobs)
