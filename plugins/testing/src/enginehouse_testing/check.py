"""The parts of a check: acts, which use an engine or another part of a plugin, and a judge of their results.

A check's acts use only the public protocol. Acts of a training engine run on every rank, in lock step; acts of a
rollout engine run in the process of its replica. All other acts run in the suite's own process. The judge runs
there, once, and turns what the acts returned into one number, which may not exceed the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:
    from enginehouse_testing.model_under_test import ModelUnderTest

PROTOCOL = "protocol"
"""Value of `capability` for a check that every engine must pass."""

EXACT = 0.0
"""The tolerance of results that must be equal bit for bit."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one act on one rank.

    Attributes:
        dp_rank: the data shard that the rank worked on.
        dp_size: number of data shards.
        is_output: True if the rank returns the results of its shard.
        value: the act's return value.
    """

    dp_rank: int
    dp_size: int
    is_output: bool
    value: Any


@dataclass(frozen=True, slots=True)
class Measured:
    """A judge's result.

    Attributes:
        error: number to compare with the tolerance; `inf` for a mistake that has no size.
        detail: a description of the error and its place.
    """

    error: float
    detail: str = ""


Act = Callable[..., Any]
"""An act takes a `Rank`, a `ReplicaTrial` (it is then a coroutine function), a `Link`, or a trial of a function."""

Judge = Callable[..., Measured]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One property of an engine, a transport or a function.

    Attributes:
        name: name in reports, which also selects the check.
        capability: the capability that the check belongs to, or `PROTOCOL`.
        claim: the property, in one sentence.
        tolerance: largest error that passes; relative if the claim says so.
        acts: each act of a training engine runs on new engines; the acts share `Rank.directory`.
        judge: `judge(*seen)` gets one list for each act, with one `Seen` for each rank.
        between: True if the second act runs in another layout than the first act, with another number of processes.
        device: `"cuda"` if the check needs a GPU for each process.
        also: a second capability that the check needs, or empty.
        reads: True if the check reads back what was written. It does not run if the author gives no way to read
            (`Given.read`).
        since: contract version that added the check; the check only warns about a plugin written for an older version.
        tolerances: largest error that passes with a user's model, by the model's dtype; empty: the check runs only
            with the tiny models.
        dtype: dtype that engines compute in, unless an act says otherwise.
    """

    name: str
    capability: str = PROTOCOL
    claim: str
    tolerance: float = EXACT
    acts: tuple[Act, ...]
    judge: Judge
    between: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    also: str = ""
    reads: bool = False
    since: str = "1.0"
    tolerances: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "float32"

    def of_model(self, model: ModelUnderTest) -> Self:
        """Return the check for another model. Its acts and judge get the model's directory as an argument."""
        asked = replace(self, tolerance=self.tolerances[model.dtype], dtype=model.dtype)
        return asked._with_directory(model.path) if model.path else asked

    def _with_directory(self, path: str) -> Self:
        given = {"models": (path,)}
        return replace(self, acts=tuple(partial(act, **given) for act in self.acts), judge=partial(self.judge, **given))

    def declared(self, capabilities: Collection[str]) -> bool:
        """Return True if a record that declares these capabilities has to pass the check."""
        return all(name in (PROTOCOL, "", *capabilities) for name in (self.capability, self.also))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCheck(Check):
    """One property of a rollout engine. Its only act gets a replica that serves `model`, at rest and not paused.

    The act gets the replica of the previous check if that replica served the same model. Earlier checks leave no trace
    in the replica except its weight version, which they may have increased.

    Attributes:
        model: name of the served model in `enginehouse_testing.prompts.ROLLOUT_MODELS`; None: there is no replica.
        breaks: True if the check leaves no usable replica behind.
        ends: True if the act may end the replica's process. If it does, the judge gets the `WorkerError` that the
            controller raises.
        fresh: True if the check runs in a process that had no engine before.
    """

    model: str | None = "tied"
    breaks: bool = False
    ends: bool = False
    fresh: bool = False

    def _with_directory(self, path: str) -> Self:
        acts = tuple(partial(act, path=path) for act in self.acts)
        return replace(self, acts=acts, judge=partial(self.judge, model=path), model=path)


class Checks(list[Check]):
    """The checks of a module, in the order in which its functions are decorated.

    A check gets the name of the decorated function, without a leading underscore. The function's docstring becomes the
    check's claim.

    Args:
        cls: class of the checks made from the functions: `Check` or `RolloutCheck`.
        shared: fields of all checks of the module, unless the decorator says otherwise.
    """

    def __init__(self, cls: type[Check] = Check, **shared: Any) -> None:
        super().__init__()
        self._cls, self._shared = cls, shared

    def act(self, **fields: Any) -> Callable[[F], F]:
        """Decorate an act that judges its own result: it returns a `Measured`, or the description of a mistake."""
        return lambda function: self._add(function, acts=(function,), judge=own_judgement, **fields)

    def judge(self, *acts: Act, **fields: Any) -> Callable[[F], F]:
        """Decorate the judge of some acts. The judge of a rollout check gets the value that its act returned."""

        def add(function: F) -> F:
            judge = partial(_judge_value, function) if self._cls is RolloutCheck else function
            return self._add(function, acts=acts, judge=judge, **fields)

        return add

    def _add(self, function: F, **fields: Any) -> F:
        claim = " ".join((function.__doc__ or "").split()).removesuffix(".")
        self.append(self._cls(**{"name": function.__name__.lstrip("_"), "claim": claim, **self._shared, **fields}))
        return function


def _judge_value(judge: Callable[..., Measured], seen: Sequence[Seen], **arguments: Any) -> Measured:
    return judge(seen[0].value, **arguments)


def own_judgement(seen: Sequence[Seen]) -> Measured:
    """Return the result of an act that judges itself. If the act returned a text, an empty text means no mistake."""
    value: Measured | str = seen[0].value
    if isinstance(value, Measured):
        return value
    return wrong(value) if value else Measured(0.0)


def wrong(detail: str) -> Measured:
    """Return the result for a mistake that has no size."""
    return Measured(float("inf"), detail)


def outputs_of(seen: Sequence[Seen]) -> list[Any]:
    """Return the values of the output ranks, in the order of their shards."""
    return [shard.value for shard in sorted(seen, key=lambda shard: shard.dp_rank) if shard.is_output]
