"""Records the tokens of an episode, for environments with several turns."""

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
    """An episode while it is played: given tokens and tokens that the policy chose, in order.

    Args:
        given: the first tokens, usually `Task.prompt_ids`.

    Attributes:
        tokens: all tokens so far, which the policy continues.
    """

    def __init__(self, given: Sequence[int]):
        self.tokens: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._rewards: dict[int, float] = {}
        self.add_given(given)

    def add_given(self, tokens: Sequence[int]) -> None:
        """Add tokens that are not trained on, such as a tool's result or the next question."""
        self._add(tokens, False, [0.0] * len(tokens), [0] * len(tokens))

    def add_drawn(self, completion: Completion) -> list[int]:
        """Add a completion that the policy sampled as a continuation of `tokens`. Return the new tokens."""
        begin = len(self.tokens)
        self._add(completion.token_ids, True, completion.logprobs, versions_of(completion).tolist())
        return self.tokens[begin:]

    def add_reward(self, reward: float) -> None:
        """Reward the last token that the policy chose, in addition to the score of the episode.

        Raises:
            ValueError: if the policy has not chosen a token yet.
        """
        if True not in self._mask:
            raise ValueError("cannot add a reward: no token was chosen yet")
        last = len(self._mask) - 1 - self._mask[::-1].index(True)
        self._rewards[last] = self._rewards.get(last, 0.0) + reward

    def episode(
        self, score: Score, prompt: str = "", response: str = "", finish: str = "stop", earlier: Sequence[Segment] = ()
    ) -> Episode:
        """Return the episode so far. The arguments are fields of `Episode`."""
        tokens, mask, logprobs, versions, rewards = self._columns()
        return Episode(tokens, mask, logprobs, versions, score, prompt, response, finish, rewards, earlier)

    def segment(self, prompt: str = "", response: str = "") -> Segment:
        """Return the tokens so far as one of several rows of an episode. The arguments are fields of `Segment`."""
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
    """Return the weight version of each token of a completion, as in `Episode.versions`; int64 `(tokens,)`."""
    versions = np.full(len(completion.token_ids), completion.first_version, dtype=np.int64)
    versions[-1:] = completion.last_version
    return versions


def response_text(tokenizer: Any, tokens: Sequence[int], finish: str = "stop") -> str:
    """Return the text that a policy generated, with marks (`<think>`, tool calls) but without the token that ends it.

    Args:
        tokenizer: the policy's tokenizer, `Policy.tokenizer`.
        tokens: the sampled tokens.
        finish: reason of the end. After `"stop"`, a special last token is removed.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    ends = [end for end in (tokenizer.eos_token_id, tokenizer.pad_token_id) if end is not None]
    text_places = np.flatnonzero(~np.isin(ids, ends))
    text_ids = ids[: text_places[-1] + 1 if len(text_places) else 0]
    if finish == "stop" and len(text_ids) == len(ids) > 0 and int(text_ids[-1]) in tokenizer.all_special_ids:
        text_ids = text_ids[:-1]
    return str(tokenizer.decode(text_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
