"""A record of the tokens that a policy generated during one play. `checks` compares chosen tokens with it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_rl.episodes.policies import SamplingPolicy

if TYPE_CHECKING:
    from enginehouse.engines.environment import Policy
    from enginehouse.engines.rollout import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class _Draw:
    """The tokens generated after some prompt (int64) and their logprobs (float32), with the range of weight versions.
    `temperature` is None if the environment left it to the run."""

    tokens: np.ndarray
    logprobs: np.ndarray
    first_version: int
    last_version: int
    temperature: float | None


class DrawnTokens:
    """Records the tokens that a policy and its branches generate during one play."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._after: dict[int, dict[bytes, list[_Draw]]] = {}  # by length and digest of the tokens before

    def record(self, policy: Policy) -> Policy:
        """Return a policy that adds to this record what it generates."""
        self._tokenizer = policy.tokenizer
        return _RecordedPolicy(policy, self)

    def add(
        self, tokens: Sequence[int], completions: Sequence[Completion], sampling: SamplingParams | None = None
    ) -> None:
        """Record completions of `tokens`; `sampling` is None if the run's own sampling parameters were used."""
        before = np.asarray(tokens, dtype=np.int64)
        draws = self._after.setdefault(len(before), {}).setdefault(_digest(before).digest(), [])
        draws += [
            _Draw(
                np.array(completion.token_ids, np.int64),
                np.array(completion.logprobs, np.float32),
                completion.first_version,
                completion.last_version,
                sampling.temperature if sampling else None,
            )
            for completion in completions
        ]

    def find_problem(
        self,
        tokens: np.ndarray,
        mask: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        temperature: float | None = None,
    ) -> str:
        """Describe the problem of the first chosen token that the policy did not generate as stated; empty if there is
        none.

        Args:
            tokens: Tokens of the row, int64 `(tokens,)`.
            mask: True for chosen tokens, bool `(tokens,)`.
            logprobs: Logprobs of the row, float32 `(tokens,)`.
            versions: Weight versions of the row, int64 `(tokens,)`.
            temperature: Temperature at which the run trains on the tokens. None: any.
        """
        wrong = mask.copy()
        reached = [(start, draw, *_match(draw, tokens, start)) for start, draw in self._iterate_draws(tokens)]
        for start, draw, end, _ in reached:
            drawn_logprobs, row_versions = draw.logprobs[: end - start], versions[start:end]
            if not _is_at(draw, temperature):
                continue
            wrong[start:end] &= ~(
                (drawn_logprobs == logprobs[start:end])
                & (draw.first_version <= row_versions)
                & (row_versions <= draw.last_version)
            )
        if not wrong.any():
            return ""
        place = int(wrong.argmax())
        covering = [(start, draw) for start, draw, end, _ in reached if start <= place < end]
        if not covering:
            drawn = [draw.tokens[place - start] for start, draw, end, longer in reached if longer and end == place]
            return self._describe_undrawn(tokens, place, drawn)
        with_logprob = [draw for start, draw in covering if draw.logprobs[place - start] == logprobs[place]]
        if not with_logprob:
            start, draw = covering[0]
            return (
                f"its token {place} has the logprob {logprobs[place]:.6g}, and it was drawn with "
                f"{draw.logprobs[place - start]:.6g} (Completion.logprobs)"
            )
        with_version = [draw for draw in with_logprob if draw.first_version <= versions[place] <= draw.last_version]
        if not with_version:
            return (
                f"its token {place} is said to be of weight version {versions[place]}, and it was drawn from "
                f"{with_logprob[0].first_version} to {with_logprob[0].last_version}"
            )
        drawn_at = with_version[0].temperature
        return (
            f"its token {place}, {self._show(tokens[place])}, was drawn at temperature {drawn_at:g}, "
            f"and the run trains at {temperature:g} (rollout.sampling.temperature): draw it at that, or leave "
            "`sampling` away, or leave it out of Episode.mask"
        )

    def _describe_undrawn(self, tokens: np.ndarray, place: int, drawn: Sequence[int]) -> str:
        """Describe a chosen token that the policy did not generate; `drawn` are tokens that it generated there."""
        explanation = f"it drew {self._show(drawn[0])} there" if drawn else "it drew nothing after just these tokens"
        before = "after the one before it" if place == 1 else f"after the {place} before it"
        return (
            f"its token {place}, {self._show(tokens[place])}, is marked as chosen, and the policy did not draw "
            f"it {before}: {explanation}. What is trained on has to be the tokens that were drawn: "
            "Completion.token_ids as they are, not their text encoded again, after the very tokens that the policy "
            "was given"
        )

    def find_repeated_choice(
        self,
        tokens: np.ndarray,
        mask: np.ndarray,
        before: Sequence[tuple[np.ndarray, np.ndarray]],
        again: Counter[bytes],
    ) -> str:
        """Describe the first chosen token that another row of the episode, with the same prefix, has chosen already.

        Empty if the policy generated each such token again, because two branches may generate the same tokens.

        Args:
            tokens: Tokens of the row, int64 `(tokens,)`.
            mask: True for chosen tokens, bool `(tokens,)`.
            before: Tokens and mask of the episode's earlier rows.
            again: Counts the repeated choices of each token in this play, by the digest of the tokens up to it. The
                first row of an episode that chooses a token is not counted, because episodes may share generated
                tokens.
        """
        times = np.zeros(len(tokens), np.int64)
        for other_tokens, chosen in before:
            count = _count_common(tokens, other_tokens)
            times[:count] += chosen[:count]
        places = np.flatnonzero(mask & (times > 0))
        if not len(places):
            return ""
        count_of = np.zeros(len(tokens), np.int64)
        for start, draw in self._iterate_draws(tokens):
            count_of[start : _match(draw, tokens, start)[0]] += 1
        for place in places.tolist():
            prefix = _digest(tokens[: place + 1]).digest()
            again[prefix] += 1
            if again[prefix] >= count_of[place]:
                return (
                    f"its token {place}, {self._show(tokens[place])}, is marked as chosen in another row of the "
                    "episode, too, which begins alike, and would count twice: mark it in one of them (Segment.mask)"
                )
        return ""

    def _iterate_draws(self, tokens: np.ndarray) -> Iterator[tuple[int, _Draw]]:
        """Yield what was generated after a prefix of a row, with the length of the prefix."""
        digest, hashed = _digest(tokens[:0]), 0
        for start in sorted(self._after):
            if start >= len(tokens):
                return
            digest.update(tokens[hashed:start].tobytes())
            hashed = start
            for draw in self._after[start].get(digest.digest(), ()):
                yield start, draw

    def _show(self, token: Any) -> str:
        with suppress(Exception):  # the user's tokenizer may raise; this is only for a message
            return f"{token} ({self._tokenizer.decode([int(token)])!r})"
        return str(token)


class _RecordedPolicy(SamplingPolicy):
    """Implements `enginehouse.engines.environment.Policy`, and records the completions of another policy."""

    def __init__(self, policy: Policy, drawn: DrawnTokens):
        self.tokenizer, self.sampling = policy.tokenizer, policy.sampling
        self._policy, self._drawn = policy, drawn

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        before: Any = np.array(tokens, dtype=np.int64)  # the environment may change them during generation
        completions = await self._policy.samples(before, n, sampling)
        self._drawn.add(before, completions, sampling)
        return completions

    def branch(self, name: str) -> Policy:
        return _RecordedPolicy(self._policy.branch(name), self._drawn)


def _is_at(draw: _Draw, temperature: float | None) -> bool:
    """True if the tokens were generated at `temperature`, or if no temperature is required."""
    return temperature is None or draw.temperature is None or math.isclose(draw.temperature, temperature, rel_tol=1e-6)


def _match(draw: _Draw, tokens: np.ndarray, start: int) -> tuple[int, bool]:
    """Return the place up to which a row matches what was generated at `start`, and True if more was generated than
    that."""
    is_equal = draw.tokens[: len(tokens) - start] == tokens[start : start + len(draw.tokens)]
    count = len(is_equal) if is_equal.all() else int(is_equal.argmin())
    return start + count, count < len(draw.tokens)


def _count_common(tokens: np.ndarray, other_tokens: np.ndarray) -> int:
    """Return the number of tokens at the beginning of two rows that are equal."""
    count = min(len(tokens), len(other_tokens))
    is_equal = tokens[:count] == other_tokens[:count]
    return count if is_equal.all() else int(is_equal.argmin())


def _digest(tokens: np.ndarray) -> Any:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16)
