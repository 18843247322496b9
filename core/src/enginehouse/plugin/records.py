"""Records: plain data by which a plugin declares its engines and functions, as `"module:attribute"` strings.

A record imports nothing. Its strings are resolved only in the process that runs the code. A kind without its own fields
is not a dataclass, because each dataclass adds a millisecond to every start of the command line.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from enginehouse.errors import EnginehouseError, nearest

F = TypeVar("F", bound=Callable[..., Any])


def _freeze(record: Record, field_name: str, collection: type[frozenset] | type[tuple]) -> None:
    """Make a field an immutable collection. Reject a single string, because `("torch")` is not a tuple."""
    value = getattr(record, field_name)
    if isinstance(value, str):
        kind = "set" if collection is frozenset else "tuple"
        raise TypeError(f"{type(record).__name__}.{field_name} must be a {kind} of strings, not the string {value!r}")
    object.__setattr__(record, field_name, collection(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The fields that all records have.

    Attributes:
        name: the name that users write in the config.
        summary: one line for `enginehouse plugins list`.

    Class attributes:
        kind: the kind's name in lookups and messages.
        references: names of the fields that hold `"module:attribute"` strings.
    """

    kind: ClassVar[str]
    references: ClassVar[tuple[str, ...]] = ()
    name: str
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """A distribution of an engine over processes that the conformance suite checks.

    Attributes:
        name: a short name for reports, such as `"shard4"` or `"tp2"`.
        processes: number of ranks.
        options: options of the engine that produce the layout, in addition to the options that every check sets.
        without: declared capabilities that this layout lacks. `certify` lists them as not declared.
        only: the only capabilities to check, for a layout with one purpose, such as splitting experts. Empty: check the
            protocol and all declared capabilities.
    """

    name: str
    processes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.name} ({self.processes} {'process' if self.processes == 1 else 'processes'}{options})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementSet:
    """The contents of a runtime, a separate Python environment for an engine. Give either `requirements` or `lock`.

    Attributes:
        requirements: requirement strings, which pip resolves.
        lock: `"package:file"`, a file in a package that pins every distribution. It is installed without resolving.
        module: top-level module of the engine. It is imported once to check a new runtime. Empty: none.
        prepare: `"module:function"` of the plugin, called in the same process before the import of `module`, for
            engines whose import needs a preparation. Empty: none.
    """

    requirements: tuple[str, ...] = ()
    lock: str = ""
    module: str = ""
    prepare: str = ""

    def __str__(self) -> str:
        return f"the pins of {self.lock}" if self.lock else ", ".join(self.requirements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend(Record):
    """The fields that the records of training and rollout engines share.

    Attributes:
        engine: `"module:Class"` of the engine, imported in the worker.
        options: `"module:Class"` of the pydantic model of the engine's options.
        capabilities: names from `enginehouse.plugin.capabilities`.
        requires: requirement strings of the distributions that the engine needs. They are checked without an import.
        runtimes: contents of the engine's runtimes by variant (`"cpu"`, `"cuda"`).
        devices: torch device types that the engine runs on.
        layouts: layouts that `enginehouse certify` checks. All of them must give the same results.
    """

    references: ClassVar[tuple[str, ...]] = ("engine", "options")
    engine: str
    options: str
    capabilities: frozenset[str] | set[str] = frozenset()
    requires: tuple[str, ...] = ()
    runtimes: Mapping[str, RequirementSet] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    layouts: tuple[Layout, ...] = (Layout("single"),)

    def __post_init__(self) -> None:
        _freeze(self, "capabilities", frozenset)
        _freeze(self, "requires", tuple)
        _freeze(self, "devices", tuple)
        _freeze(self, "layouts", tuple)


class TrainBackend(Backend):
    """A training engine's record. The engine implements `enginehouse.engines.TrainEngine`."""

    __slots__ = ()
    kind: ClassVar[str] = "train"


class RolloutBackend(Backend):
    """A rollout engine's record. The engine implements `enginehouse.engines.RolloutEngine`."""

    __slots__ = ()
    kind: ClassVar[str] = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport(Record):
    """A weight transport. Its class implements `enginehouse.engines.WeightTransport`.

    Attributes:
        transport: `"module:Class"`, constructed without arguments.
        capabilities: the transport's reach: `SAME_PROCESS`, `SAME_HOST`, `CROSS_HOST`.
        trainer_copies: number of copies of the sent weights that all training ranks together keep in host memory
            between updates, each rank as much as any other.
        replica_copies: largest number of copies, over all engines, that each rollout replica keeps in host memory
            between updates.
    """

    kind: ClassVar[str] = "transport"
    references: ClassVar[tuple[str, ...]] = ("transport",)
    transport: str
    capabilities: frozenset[str] | set[str] = frozenset()
    trainer_copies: int = 0
    replica_copies: int = 0

    def __post_init__(self) -> None:
        _freeze(self, "capabilities", frozenset)


COLLECT_RULES = ("list", "concat", "distributed", "first", "merge")
"""Names of the built-in rules that collect results; see `enginehouse.controller.register`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchMode(Record):
    """A way to split the arguments of a call over a worker group and to collect its results.

    Attributes:
        dispatch: `"module:function"`. `dispatch(group, *args, **kwargs)` returns one `(args, kwargs)` for each rank, or
            None for a rank that is not called.
        collect: `"list"`, `"concat"`, `"distributed"`, `"first"` or `"merge"`, applied to the results that come back;
            or `"module:function"`, called as `collect(group, outputs) -> result` with one output for each rank, None
            for a rank whose output did not come back. The `collect` of a method's `@register` overrides this field.
        returning: `"module:function"`. `returning(group)` lists the ranks whose results come back; other results stay
            on their workers. Empty: the results of every called rank come back.
        awaits_futures: True if `dispatch` reads its arguments. The controller then waits for each `Future` among them,
            and `dispatch` gets the result. If False, the worker resolves a `Future`.
    """

    kind: ClassVar[str] = "dispatch_mode"
    dispatch: str
    collect: str = "list"
    returning: str = ""
    awaits_futures: bool = False

    @property
    def references(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the fields that hold `"module:attribute"` strings in this record."""
        collect = () if self.collect in COLLECT_RULES else ("collect",)
        returning = ("returning",) if self.returning else ()
        return ("dispatch", *collect, *returning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Record):
    """The fields of records that name one function.

    Attributes:
        function: `"module:function"`.
        requires: requirement strings of the distributions that the function needs. They are checked without an import.
    """

    references: ClassVar[tuple[str, ...]] = ("function",)
    function: str
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze(self, "requires", tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage(Function):
    """An advantage estimator: `function(batch, **arguments) -> Batch` adds an `advantages` column.

    Attributes:
        compares_samples: True if it compares the samples of a prompt, and therefore needs at least two samples.
        needs: names of the columns that it reads. Only these are sent to the controller. None: all columns but texts.
    """

    kind: ClassVar[str] = "advantage"
    compares_samples: bool = False
    needs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Function):
    """A loss: `function(view: TokenView, **arguments) -> LossValue` (`enginehouse.engines`).

    Attributes:
        needs_actor_logprobs: names of arguments that, if set, require `old_logprobs` computed by the actor.
        always_needs_actor_logprobs: True if the loss always requires `old_logprobs` computed by the actor, because it
            clips its ratio to a range smaller than the rounding differences between two engines.
        ratio_bounds: names of arguments that bound the distance of the ratio from 1. If such a bound is below 0.05 and
            the run computes in bfloat16, the actor computes `old_logprobs`, unless the config chooses otherwise.
        taken_from: config keys by argument. An argument that is not set gets the value of its config key, such as
            `rollout.sampling.max_tokens`.
        output: the engine output that the loss is computed from: `"logprobs"`, or `"values"` for a critic.
    """

    kind: ClassVar[str] = "loss"
    needs_actor_logprobs: tuple[str, ...] = ()
    always_needs_actor_logprobs: bool = False
    ratio_bounds: tuple[str, ...] = ()
    taken_from: Mapping[str, str] = field(default_factory=dict)
    output: str = "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Function):
    """A stage of a step, before the advantage. See docs/plugins/stage.md.

    `function(batch: Batch, **arguments) -> Batch` returns the same rows with columns added or changed. A stage runs if
    a config names it under `stages`, or if the advantage needs a column that it adds.

    Attributes:
        function: `"module:function"`. Empty: the stage only adds the column of its model.
        needs: names of the columns that `function` reads, besides the column of the stage's model. Only these are sent
            to the controller.
        adds: names of the columns that `function` adds or changes. A stage that changes `reward` runs before the KL
            term.
        model: output of the stage's model, whose path the config gives as `stages.NAME.path`. `"logprobs"` adds
            one value per token as column `NAME_logprobs`. `"score"` adds one value per episode, from a value head, as
            column `NAME_score`, which is 0 except in the last row of the episode. Empty: no model.
    """

    kind: ClassVar[str] = "stage"
    function: str = ""
    needs: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    model: Literal["", "logprobs", "score"] = ""

    def __post_init__(self) -> None:
        _freeze(self, "requires", tuple)
        _freeze(self, "needs", tuple)
        _freeze(self, "adds", tuple)
        if self.model not in ("", "logprobs", "score"):
            raise TypeError(f"Stage.model must be 'logprobs', 'score' or empty, not {self.model!r}")
        if bool(self.function) != bool(self.adds) or not self.columns:
            raise TypeError("a Stage must set function and adds together, or only model")

    @property
    def references(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the fields that hold `"module:attribute"` strings in this record."""
        return ("function",) if self.function else ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that the stage adds or changes."""
        return (*([f"{self.name}_{self.model}"] if self.model else []), *self.adds)


class Reward(Function):
    """A reward: `function(prompt, response, **columns) -> float`, run in a process pool. See docs/rewards.md."""

    __slots__ = ()
    kind: ClassVar[str] = "reward"


class Filter(Function):
    """A filter: `function(group: Group, **arguments) -> bool` returns True to train on the group.

    `Group` is `enginehouse.engines.environment.Group`.
    """

    __slots__ = ()
    kind: ClassVar[str] = "filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker(Record):
    """A receiver of a run's metrics. Its class implements `enginehouse.engines.tracker.Tracker`.

    Attributes:
        tracker: `"module:Class"`, constructed as `Class(**arguments)` with the arguments of the config. `plan` imports
            the module. Import the distributions of `requires` only in `start`.
        requires: requirement strings of the distributions that it needs. They are checked without an import.
    """

    kind: ClassVar[str] = "tracker"
    references: ClassVar[tuple[str, ...]] = ("tracker",)
    tracker: str
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze(self, "requires", tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Record):
    """An environment, which turns a task into episodes. See docs/plugins/environment.md.

    Attributes:
        environment: `"module:Class"`, constructed as `Class(**arguments)` with the arguments of the config. The class
            implements `enginehouse.engines.environment.Environment`.
    """

    kind: ClassVar[str] = "environment"
    references: ClassVar[tuple[str, ...]] = ("environment",)
    environment: str


KINDS: tuple[type[Record], ...] = (
    TrainBackend, RolloutBackend, Transport, DispatchMode, Advantage, Loss, Reward, Filter, Tracker,
    Environment, Stage,
)  # fmt: skip
"""Every kind of record."""


class ResolveError(EnginehouseError):
    """The object of a `"module:attribute"` string cannot be imported."""


def resolve(reference: str) -> Any:
    """Import and return the object that a `"module:attribute"` string names.

    Raises:
        ResolveError: if the string has no colon, the module cannot be imported, or it lacks the attribute. The cause
            is chained.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ResolveError(f"{reference!r} is not of the form 'module:attribute'")
    try:
        target = importlib.import_module(module_name)
    except Exception as error:
        raise ResolveError(
            f"cannot import {module_name!r} for {reference!r}: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            close = nearest(part, [name for name in dir(target) if not name.startswith("_")])
            raise ResolveError(
                f"module {module_name!r} has no {attribute!r} (asked for by {reference!r}). {close}"
            ) from None
    return target


def keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of a function's keyword arguments; None if it accepts any keyword, or if they are unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None  # a function in C may have no signature
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def is_batched(function: Callable[..., Any]) -> bool:
    """Return True if `batched_reward` marked a reward, or the reward inside a `functools.partial`."""
    while isinstance(function, functools.partial) and not hasattr(function, "batched"):
        function = function.func
    return bool(getattr(function, "batched", False))


def batched_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward that scores many responses per call. Its arguments are lists, and it returns a list."""
    function.batched = True  # type: ignore[attr-defined]
    return function


def checked_reward(check: Callable[[Mapping[str, Any], Sequence[str] | None], None]) -> Callable[[F], F]:
    """Attach `check(arguments, columns)` to a reward. `plan` calls it.

    `arguments` are the reward's arguments in the config. `columns` are the names of the columns of the data, or None if
    they are unknown.
    `check` raises `ConfigError` if a run could not succeed.
    """

    def mark(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]
        return function

    return mark
