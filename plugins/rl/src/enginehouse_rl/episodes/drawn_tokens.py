"""What a policy drew in one play, so that tokens that are marked as chosen can be compared with it."""

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
    """What was drawn after some tokens: int64 tokens and float32 logprobs, from these weight versions.

    `temperature` is None where the environment left it to the run.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    first_version: int
    last_version: int
    temperature: float | None


class DrawnTokens:
    """What a policy and its branches draw, remembered for one play."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._after: dict[int, dict[bytes, list[_Draw]]] = {}  # by length and digest of the tokens before

    def record(self, policy: Policy) -> Policy:
        """The same policy, of which all that it draws is remembered here."""
        self._tokenizer = policy.tokenizer
        return _RecordedPolicy(policy, self)

    def add(
        self, tokens: Sequence[int], completions: Sequence[Completion], sampling: SamplingParams | None = None
    ) -> None:
        """Remember what was drawn after `tokens`; `sampling` is None where it was drawn as the run is configured."""
        before = np.asarray(tokens, dtype=np.int64)
        here = self._after.setdefault(len(before), {}).setdefault(_digest(before).digest(), [])
        here += [
            _Draw(
                np.array(one.token_ids, np.int64),
                np.array(one.logprobs, np.float32),
                one.first_version,
                one.last_version,
                sampling.temperature if sampling else None,
            )
            for one in completions
        ]

    def find_problem(
        self,
        tokens: np.ndarray,
        mask: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        temperature: float | None = None,
    ) -> str:
        """What is wrong with the first chosen token of a row that was not drawn so; empty if all were.

        Args:
            tokens: int64 `(tokens,)`.
            mask: bool, alike: which are chosen.
            logprobs: float32, alike.
            versions: int64, alike.
            temperature: at which they are trained on. None: any will do.
        """
        wrong = mask.copy()
        reached = [(start, draw, *_match(draw, tokens, start)) for start, draw in self._iterate_draws(tokens)]
        for start, draw, end, _ in reached:
            of_draw, versions_here = draw.logprobs[: end - start], versions[start:end]
            if not _is_at(draw, temperature):
                continue
            wrong[start:end] &= ~(
                (of_draw == logprobs[start:end])
                & (draw.first_version <= versions_here)
                & (versions_here <= draw.last_version)
            )
        if not wrong.any():
            return ""
        place = int(wrong.argmax())
        covering = [(start, draw) for start, draw, end, _ in reached if start <= place < end]
        if not covering:
            instead = [draw.tokens[place - start] for start, draw, end, longer in reached if longer and end == place]
            said = f"it drew {self._show(instead[0])} there" if instead else "it drew nothing after just these tokens"
            before = "after the one before it" if place == 1 else f"after the {place} before it"
            return (
                f"its token {place}, {self._show(tokens[place])}, is marked as chosen, and the policy did not draw "
                f"it {before}: {said}. What is trained on has to be the tokens that were drawn: "
                "Completion.token_ids as they are, not their text encoded again, after the very tokens that the policy "
                "was given"
            )
        alike = [draw for start, draw in covering if draw.logprobs[place - start] == logprobs[place]]
        if not alike:
            start, draw = covering[0]
            return (
                f"its token {place} has the logprob {logprobs[place]:.6g}, and it was drawn with "
                f"{draw.logprobs[place - start]:.6g} (Completion.logprobs)"
            )
        of_version = [draw for draw in alike if draw.first_version <= versions[place] <= draw.last_version]
        if not of_version:
            return (
                f"its token {place} is said to be of weight version {versions[place]}, and it was drawn from "
                f"{alike[0].first_version} to {alike[0].last_version}"
            )
        return (
            f"its token {place}, {self._show(tokens[place])}, was drawn at temperature {of_version[0].temperature:g}, "
            f"and the run trains at {temperature:g} (rollout.sampling.temperature): draw it at that, or leave "
            "`sampling` away, or leave it out of Episode.mask"
        )

    def find_repeated_choice(
        self,
        tokens: np.ndarray,
        mask: np.ndarray,
        before: Sequence[tuple[np.ndarray, np.ndarray]],
        again: Counter[bytes],
    ) -> str:
        """What is wrong with the first chosen token of a row that other rows of its episode, which begin alike, have
        chosen already; empty if each is one more that was drawn, as two branches may draw the same.

        Args:
            tokens: int64 `(tokens,)`.
            mask: bool, alike: which are chosen.
            before: tokens and mask of the episode's rows before it.
            again: by the digest of all up to it, how often a token of this play was chosen by a row that was not its
                episode's first to do so. Episodes may share what was drawn, so that one draw is the first of each.
        """
        times = np.zeros(len(tokens), np.int64)
        for others, chosen in before:
            count = _count_common(tokens, others)
            times[:count] += chosen[:count]
        places = np.flatnonzero(mask & (times > 0))
        if not len(places):
            return ""
        count_of = np.zeros(len(tokens), np.int64)
        for start, draw in self._iterate_draws(tokens):
            count_of[start : _match(draw, tokens, start)[0]] += 1
        for place in places.tolist():
            drawn_here = _digest(tokens[: place + 1]).digest()
            again[drawn_here] += 1
            if again[drawn_here] >= count_of[place]:
                return (
                    f"its token {place}, {self._show(tokens[place])}, is marked as chosen in another row of the "
                    "episode, too, which begins alike, and would count twice: mark it in one of them (Segment.mask)"
                )
        return ""

    def _iterate_draws(self, tokens: np.ndarray) -> Iterator[tuple[int, _Draw]]:
        """What was drawn after the first tokens of a row, and how many these are."""
        digest, hashed = _digest(tokens[:0]), 0
        for start in sorted(self._after):
            if start >= len(tokens):
                return
            digest.update(tokens[hashed:start].tobytes())
            hashed = start
            for draw in self._after[start].get(digest.digest(), ()):
                yield start, draw

    def _show(self, token: Any) -> str:
        with suppress(Exception):  # somebody's tokenizer, for a message
            return f"{token} ({self._tokenizer.decode([int(token)])!r})"
        return str(token)


class _RecordedPolicy(SamplingPolicy):
    """Implements `enginehouse.engines.environment.Policy`."""

    def __init__(self, policy: Policy, drawn: DrawnTokens):
        self.tokenizer, self.sampling = policy.tokenizer, policy.sampling
        self._policy, self._drawn = policy, drawn

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """See the protocol."""
        before: Any = np.array(tokens, dtype=np.int64)  # they may change while these are drawn
        completions = await self._policy.samples(before, n, sampling)
        self._drawn.add(before, completions, sampling)
        return completions

    def branch(self, name: str) -> Policy:
        """See the protocol."""
        return _RecordedPolicy(self._policy.branch(name), self._drawn)


def _is_at(draw: _Draw, temperature: float | None) -> bool:
    """Whether something was drawn at a temperature, where that is asked."""
    return temperature is None or draw.temperature is None or math.isclose(draw.temperature, temperature, rel_tol=1e-6)


def _match(draw: _Draw, tokens: np.ndarray, start: int) -> tuple[int, bool]:
    """Where a row stops being what was drawn after its first `start` tokens; and whether more was drawn than that."""
    same = draw.tokens[: len(tokens) - start] == tokens[start : start + len(draw.tokens)]
    count = len(same) if same.all() else int(same.argmin())
    return start + count, count < len(draw.tokens)


def _count_common(tokens: np.ndarray, others: np.ndarray) -> int:
    """How many tokens two rows begin alike with."""
    count = min(len(tokens), len(others))
    same = tokens[:count] == others[:count]
    return count if same.all() else int(same.argmin())


def _digest(tokens: np.ndarray) -> Any:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16)
