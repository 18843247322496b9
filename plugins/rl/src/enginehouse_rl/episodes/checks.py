"""Whether what an environment returns can be trained on; above all, whether the policy drew what is trained on.

A chosen token has to be one that the policy drew, in this play, after just the tokens that stand before it in the
episode, with the logprob that it was drawn with. An environment that decodes a response and encodes it again, or edits
what was said, breaks that without a sign: the loss would be that of tokens that nobody drew. So does one of several
rows an episode that marks what they begin with as chosen in each: it would count several times.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse.engines.environment import Episode, Segment
from enginehouse.errors import EnginehouseError
from enginehouse_rl.episodes.policies import BySamples
from enginehouse_rl.plan.rewards import is_reserved

if TYPE_CHECKING:
    from enginehouse.engines.environment import Policy
    from enginehouse.engines.rollout import Completion, SamplingParams

FAILED = "failed"
"""Why an episode ended that could not be made, and so has no token of the policy's."""


class MalformedEpisode(EnginehouseError):
    """An environment returned what cannot be trained on."""


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

    def policy(self, policy: Policy) -> Policy:
        """The same policy, of which all that it draws is remembered here."""
        self._tokenizer = policy.tokenizer
        return _Remembered(policy, self)

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

    def problem(
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
        reached = [(start, draw, *_alike(draw, tokens, start)) for start, draw in self._drawn_after_its_tokens(tokens)]
        for start, draw, end, _ in reached:
            of_draw, versions_here = draw.logprobs[: end - start], versions[start:end]
            if not _at(draw, temperature):
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
            said = f"it drew {self._named(instead[0])} there" if instead else "it drew nothing after just these tokens"
            before = "after the one before it" if place == 1 else f"after the {place} before it"
            return (
                f"its token {place}, {self._named(tokens[place])}, is marked as chosen, and the policy did not draw "
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
            f"its token {place}, {self._named(tokens[place])}, was drawn at temperature {of_version[0].temperature:g}, "
            f"and the run trains at {temperature:g} (rollout.sampling.temperature): draw it at that, or leave "
            "`sampling` away, or leave it out of Episode.mask"
        )

    def chosen_again(
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
            count = _common(tokens, others)
            times[:count] += chosen[:count]
        places = np.flatnonzero(mask & (times > 0))
        if not len(places):
            return ""
        count_of = np.zeros(len(tokens), np.int64)
        for start, draw in self._drawn_after_its_tokens(tokens):
            count_of[start : _alike(draw, tokens, start)[0]] += 1
        for place in places.tolist():
            drawn_here = _digest(tokens[: place + 1]).digest()
            again[drawn_here] += 1
            if again[drawn_here] >= count_of[place]:
                return (
                    f"its token {place}, {self._named(tokens[place])}, is marked as chosen in another row of the "
                    "episode, too, which begins alike, and would count twice: mark it in one of them (Segment.mask)"
                )
        return ""

    def _drawn_after_its_tokens(self, tokens: np.ndarray) -> Iterator[tuple[int, _Draw]]:
        """What was drawn after the first tokens of a row, and how many these are."""
        digest, hashed = _digest(tokens[:0]), 0
        for start in sorted(self._after):
            if start >= len(tokens):
                return
            digest.update(tokens[hashed:start].tobytes())
            hashed = start
            for draw in self._after[start].get(digest.digest(), ()):
                yield start, draw

    def _named(self, token: Any) -> str:
        with suppress(Exception):  # somebody's tokenizer, for a message
            return f"{token} ({self._tokenizer.decode([int(token)])!r})"
        return str(token)


class _Remembered(BySamples):
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
        return _Remembered(self._policy.branch(name), self._drawn)


@dataclass(frozen=True, slots=True)
class EpisodeChecks:
    """What episodes of an environment have to be.

    Attributes:
        environment: its name, for messages.
        vocabulary: how many tokens the models of the run know. None: any.
        most_tokens: how long a row may be. None: any.
        token_rewards: whether rewards of single tokens are read.
        temperature: at which its tokens are trained on. None: they are not, or any will do.
    """

    environment: str
    vocabulary: int | None = None
    most_tokens: int | None = None
    token_rewards: bool = True
    temperature: float | None = None

    def check(self, episodes: Sequence[Episode], count: int, drawn: DrawnTokens | None, task: str) -> None:
        """Check what `Environment.run` returned.

        Args:
            episodes: that.
            count: how many are wanted.
            drawn: what its policy drew. None: whether it drew what is marked as chosen is not asked.
            task: what was played, for messages.

        Raises:
            MalformedEpisode: naming the environment, the episode, and the first token that is wrong.
        """
        if not isinstance(episodes, Sequence):
            raise MalformedEpisode(
                f"environment {self.environment!r}, {task}: it returned {type(episodes).__name__}, not a list of "
                "episodes"
            )
        if len(episodes) != count:
            raise MalformedEpisode(
                f"environment {self.environment!r}, {task}: it returned {len(episodes)} episode(s), and {count} were "
                "asked for (EpisodeContext.samples)"
            )
        again: Counter[bytes] = Counter()
        for number, episode in enumerate(episodes):
            try:
                problem = self._problem(episode, drawn, again)
            except Exception as error:  # in the environment's own classes: its mistake, whatever it is
                problem = f"looking at it raised {type(error).__name__}: {error}"
            if problem:
                raise MalformedEpisode(
                    f"environment {self.environment!r}, {task}: episode {number} cannot be trained on: {problem}"
                )

    def _problem(self, episode: Episode, drawn: DrawnTokens | None, again: Counter[bytes]) -> str:
        """What is wrong with an episode; empty if nothing is."""
        if not isinstance(episode, Episode):
            return f"it is {type(episode).__name__}, not an Episode (enginehouse.engines.environment)"
        earlier = episode.earlier
        others = (
            [one for one in earlier if not isinstance(one, Segment)] if isinstance(earlier, Sequence) else [earlier]
        )
        if others:
            found = "" if others[0] is earlier else "a list that holds "
            return f"its earlier rows are {found}{type(others[0]).__name__}, not a list of Segments (Episode.earlier)"
        before: list[tuple[np.ndarray, np.ndarray]] = []
        for number, row in enumerate(episode.rows):
            if problem := self._problem_of_row(row, episode.finish, drawn, before, again):
                return f"row {number} of its {len(episode.rows)}: {problem}" if earlier else problem
        return _problem_of_score(episode.score) or _problem_of_text("its finish", episode.finish)

    def _problem_of_row(
        self,
        row: Episode | Segment,
        finish: str,
        drawn: DrawnTokens | None,
        before: list[tuple[np.ndarray, np.ndarray]],
        again: Counter[bytes],
    ) -> str:
        """What is wrong with a row of an episode that ended so; it joins those `before` it. Arguments as of
        `DrawnTokens.chosen_again`."""
        columns = {}
        for name, kinds, what in _COLUMNS:
            try:
                column = np.asarray(getattr(row, name))
            except Exception as error:
                return f"its {name} are no row of numbers: {type(error).__name__}: {error}"
            if column.ndim != 1 or (len(column) and column.dtype.kind not in kinds):
                return f"its {name} are not one {what} a token, but {column.dtype} of shape {column.shape}"
            columns[name] = column
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{count} {name}" for name, count in lengths.items())
            return f"it has {said}: one of each a token is wanted"
        tokens, mask = columns["tokens"].astype(np.int64), columns["mask"].astype(np.bool_)
        logprobs, versions = columns["logprobs"].astype(np.float32), columns["versions"].astype(np.int64)
        problem = (
            self._problem_of_tokens(tokens)
            or _problem_of_choice(mask, finish)
            or _problem_of_logprobs(logprobs)
            or (drawn.problem(tokens, mask, logprobs, versions, self.temperature) if drawn else "")
            or (drawn.chosen_again(tokens, mask, before, again) if drawn and before else "")
            or self._problem_of_token_rewards(row.token_rewards, mask)
            or next((said for name in _TEXTS if (said := _problem_of_text(f"its {name}", getattr(row, name)))), "")
        )
        before.append((tokens, mask))
        return problem

    def _problem_of_token_rewards(self, token_rewards: Any, mask: np.ndarray) -> str:
        if token_rewards is None:
            return ""
        if not self.token_rewards:
            return (
                "it has token_rewards, which the advantage of this run does not read; one that does is process_rewards "
                "(algorithm.advantage.name)"
            )
        try:
            rewards = np.asarray(token_rewards)
        except Exception as error:
            return f"its token_rewards are no row of numbers: {type(error).__name__}: {error}"
        if rewards.dtype.kind not in "fiu" or rewards.shape != mask.shape:
            return f"its token_rewards are {rewards.dtype} of shape {rewards.shape}, and it has {len(mask)} tokens"
        wrong = ~np.isfinite(rewards.astype(np.float32)) | ((rewards != 0) & ~mask)
        if not wrong.any():
            return ""
        place = int(wrong.argmax())
        return f"the reward of its token {place} is {rewards[place]}" + (
            "" if mask[place] else ", and the policy did not choose it"
        )

    def _problem_of_tokens(self, tokens: np.ndarray) -> str:
        if not len(tokens):
            return "it has no tokens"
        if self.most_tokens is not None and len(tokens) > self.most_tokens:
            return (
                f"it has {len(tokens)} tokens, and the models of this run read at most {self.most_tokens}: end it "
                "before that"
            )
        beyond = tokens < 0
        if self.vocabulary is not None:
            beyond |= tokens >= self.vocabulary
        if beyond.any():
            place = int(beyond.argmax())
            known = "" if self.vocabulary is None else f", and the models of this run know 0 to {self.vocabulary - 1}"
            return f"its token {place} is {tokens[place]}{known}"
        return ""


_COLUMNS = (
    ("tokens", "iu", "token id"),
    ("mask", "biu", "true or false"),
    ("logprobs", "fiu", "logprob"),
    ("versions", "iu", "weight version"),
)
"""What an episode has a token, of which kinds of numpy's that may be, and what it is."""

_TEXTS = ("prompt", "response")


def _at(draw: _Draw, temperature: float | None) -> bool:
    """Whether something was drawn at a temperature, where that is asked."""
    return temperature is None or draw.temperature is None or math.isclose(draw.temperature, temperature, rel_tol=1e-6)


def _problem_of_text(what: str, value: Any) -> str:
    return "" if isinstance(value, str) else f"{what} is {value!r}, not text"


def _problem_of_choice(mask: np.ndarray, finish: str) -> str:
    if finish == FAILED:
        return f"it ended as {FAILED!r}, and has tokens that are marked as chosen" if mask.any() else ""
    return "" if mask.any() else "none of its tokens is marked as chosen (Episode.mask)"


def _problem_of_logprobs(logprobs: np.ndarray) -> str:
    finite = np.isfinite(logprobs)
    if finite.all():
        return ""
    place = int((~finite).argmax())
    return f"the logprob of its token {place} is {logprobs[place]}"


_NUMBERS = (int, float, np.integer, np.floating)


def _problem_of_score(score: Any) -> str:
    reward = getattr(score, "reward", None)
    if isinstance(reward, bool) or not isinstance(reward, _NUMBERS):
        return f"its score is {score!r}: one of EpisodeContext.score is wanted, or Scored(1.0)"
    if not math.isfinite(np.float32(reward)):
        return f"its reward is {reward}"
    figures = getattr(score, "figures", None)
    if not isinstance(figures, Mapping):
        return f"the figures of its score are {figures!r}, not numbers by name"
    for name, value in figures.items():
        if said := _problem_of_text("the name of a figure of its score", name):
            return said
        if is_reserved(name) or "/" in name:
            return f"its score has a figure {name!r}, which no figure may be called (docs/rewards.md)"
        if not isinstance(value, _NUMBERS) or not math.isfinite(value):
            return f"the figure {name!r} of its score is {value!r}, not a number"
    texts = ((f"the {name} of its score", getattr(score, name, None)) for name in ("failure", "answer"))
    return next((said for what, value in texts if (said := _problem_of_text(what, value))), "")


def _alike(draw: _Draw, tokens: np.ndarray, start: int) -> tuple[int, bool]:
    """Where a row stops being what was drawn after its first `start` tokens; and whether more was drawn than that."""
    same = draw.tokens[: len(tokens) - start] == tokens[start : start + len(draw.tokens)]
    count = len(same) if same.all() else int(same.argmin())
    return start + count, count < len(draw.tokens)


def _common(tokens: np.ndarray, others: np.ndarray) -> int:
    """How many tokens two rows begin alike with."""
    count = min(len(tokens), len(others))
    same = tokens[:count] == others[:count]
    return count if same.all() else int(same.argmin())


def _digest(tokens: np.ndarray) -> Any:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16)
