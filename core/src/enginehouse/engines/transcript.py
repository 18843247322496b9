"""An episode as it is played: what environments of several turns keep their tokens in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse.engines.environment import Episode, Segment

if TYPE_CHECKING:
    from enginehouse.engines.environment import Score
    from enginehouse.engines.rollout import Completion

__all__ = ["Transcript", "response_text"]


class Transcript:
    """An episode as it is played: tokens that are given, and tokens that the policy chose, one after another.

    Args:
        given: its first tokens, as `Task.prompt_ids`.

    Attributes:
        tokens: all so far: what the policy is asked to continue.
    """

    def __init__(self, given: Sequence[int]):
        self.tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._rewards: dict[int, float] = {}
        self.add_given(given)

    def add_given(self, tokens: Sequence[int]) -> None:
        """Add tokens that are not trained on: what a tool answers, or the next question."""
        self._add(tokens, False, [0.0] * len(tokens), [0] * len(tokens))

    def add_drawn(self, completion: Completion) -> list[int]:
        """Add what the policy drew when it was asked to continue `tokens`; returns the new ones."""
        begin = len(self.tokens)
        self._add(completion.token_ids, True, completion.logprobs, versions_of(completion).tolist())
        return self.tokens[begin:]

    def add_reward(self, reward: float) -> None:
        """Reward the last token that the policy chose, beside the score of the whole: a step's reward."""
        if True not in self._mask:
            raise ValueError("no token was chosen that a reward could be given to")
        last = len(self._mask) - 1 - self._mask[::-1].index(True)
        self._rewards[last] = self._rewards.get(last, 0.0) + reward

    def episode(
        self, score: Score, prompt: str = "", response: str = "", finish: str = "stop", earlier: Sequence[Segment] = ()
    ) -> Episode:
        """The episode as it is now; arguments as of `Episode`."""
        tokens, mask, logprobs, versions, rewards = self._columns()
        return Episode(tokens, mask, logprobs, versions, score, prompt, response, finish, rewards, earlier)

    def segment(self, prompt: str = "", response: str = "") -> Segment:
        """A row of an episode that has several, as it is now; arguments as of `Segment`."""
        tokens, mask, logprobs, versions, rewards = self._columns()
        return Segment(tokens, mask, logprobs, versions, prompt, response, rewards)

    def _columns(self) -> tuple[list[int], list[bool], list[float], list[int], list[float] | None]:
        rewards = [self._rewards.get(place, 0.0) for place in range(len(self.tokens))] if self._rewards else None
        return list(self.tokens), list(self._mask), list(self._logprobs), list(self._versions), rewards

    def _add(self, tokens: Sequence[int], is_chosen: bool, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.tokens += map(int, tokens)
        self._mask += [is_chosen] * len(tokens)
        self._logprobs += map(float, logprobs)
        self._versions += versions


def versions_of(completion: Completion) -> np.ndarray:
    """The weight version of each token of a completion, as of `Episode.versions`; int64 `(tokens,)`."""
    versions = np.full(len(completion.token_ids), completion.first_version, dtype=np.int64)
    versions[-1:] = completion.last_version
    return versions


def response_text(tokenizer: Any, tokens: Sequence[int], finish: str = "stop") -> str:
    """Return what a policy wrote, with the marks that it wrote (`<think>`, calls of tools), less what ends it.

    Args:
        tokenizer: of the policy, `Policy.tokenizer`.
        tokens: as they were drawn.
        finish: why they end; after `"stop"` a last token that is special is the end.
    """
    kept = np.asarray(tokens, dtype=np.int64)
    ends = [one for one in (tokenizer.eos_token_id, tokenizer.pad_token_id) if one is not None]
    others = np.flatnonzero(~np.isin(kept, ends))
    whole = len(kept)
    kept = kept[: others[-1] + 1 if len(others) else 0]
    if finish == "stop" and len(kept) == whole > 0 and int(kept[-1]) in tokenizer.all_special_ids:
        kept = kept[:-1]
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
