"""What a plugin declares: plain data, one record a thing. Code is named by `"module:attribute"` strings.

A record imports nothing: a string is resolved in the process that runs the thing, and nowhere else. Kinds that add no
field are no dataclasses of their own: each costs a millisecond of every start of the command line.
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
    """Make a collection field immutable, and refuse a lone string (`("torch")` is no tuple)."""
    value = getattr(record, field_name)
    if isinstance(value, str):
        raise TypeError(f"{type(record).__name__}.{field_name} takes several strings, not the one string {value!r}")
    object.__setattr__(record, field_name, collection(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all records have.

    Attributes:
        name: what users write in the config.
        summary: one line for `enginehouse plugins list`.

    Class attributes:
        kind: the word for what it is, in lookups and messages.
        references: its fields that are `"module:attribute"` strings.
    """

    kind: ClassVar[str]
    references: ClassVar[tuple[str, ...]] = ()
    name: str
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """A way of laying an engine out over processes that the conformance suite checks.

    Attributes:
        name: short, for reports: `"shard4"`, `"tp2"`.
        processes: number of ranks.
        options: the backend's own options that make the layout, beside those every check sets.
        without: declared capabilities that this layout lacks; `certify` lists them as not declared.
        only: capabilities that are all it is checked for, where it serves nothing else: a layout that splits experts
            runs no model without any. Empty: what every engine does, and all that is declared.
    """

    name: str
    processes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        given = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.name} ({self.processes} {'process' if self.processes == 1 else 'processes'}{given})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementSet:
    """What a runtime, a Python environment of a backend's own, is made of. One of the first two is given.

    Attributes:
        requirements: requirement strings, resolved by pip.
        lock: `"package:file"`, a file in a package that pins everything; installed as it is, without resolving.
        module: the engine's top-level module, imported once when the runtime is made; empty: none.
        prepare: `"module:function"` of the plugin, called before `module` is imported, in the same process; for an
            engine that cannot be imported by itself there. Empty: none.
    """

    requirements: tuple[str, ...] = ()
    lock: str = ""
    module: str = ""
    prepare: str = ""

    def __str__(self) -> str:
        return f"all that {self.lock} pins" if self.lock else ", ".join(self.requirements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend(Record):
    """What training and rollout backends have in common.

    Attributes:
        engine: `"module:Class"` of the engine, imported in the worker.
        options: `"module:Class"` of a pydantic model of this backend's options.
        capabilities: names from `enginehouse.plugin.capabilities`.
        requires: requirement strings that must be installed for the engine to run; checked without importing.
        runtimes: what Python environments of its own are made of, by variant (`"cpu"`, `"cuda"`).
        devices: device types the engine runs on.
        layouts: what `enginehouse certify` checks it at; all of them are promised to give the same results.
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
    """A training engine (`enginehouse.engines.train.TrainEngine`)."""

    __slots__ = ()
    kind: ClassVar[str] = "train"


class RolloutBackend(Backend):
    """A rollout engine (`enginehouse.engines.rollout.RolloutEngine`)."""

    __slots__ = ()
    kind: ClassVar[str] = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport(Record):
    """A weight transport (`enginehouse.engines.weights.WeightTransport`), by its class.

    Attributes:
        transport: `"module:Class"`, constructed without arguments.
        capabilities: reach: `SAME_PROCESS`, `SAME_HOST`, `CROSS_HOST`.
    """

    kind: ClassVar[str] = "transport"
    references: ClassVar[tuple[str, ...]] = ("transport",)
    transport: str
    capabilities: frozenset[str] | set[str] = frozenset()

    def __post_init__(self) -> None:
        _freeze(self, "capabilities", frozenset)


COLLECT_RULES = ("list", "concat", "distributed", "first", "merge")
"""The ways to put results together that have a name; `enginehouse.controller.register` says what each does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchMode(Record):
    """How a call's arguments are split over a group and its results gathered.

    Attributes:
        dispatch: `"module:function"`, `dispatch(group, *args, **kwargs)` returns one `(args, kwargs)` a rank, None for
            a rank that is not called.
        collect: one of `COLLECT_RULES`, over the ranks whose results come back; or `"module:function"`,
            `collect(group, outputs) -> result`, `outputs` one a rank, None where none came back. A method registered
            with a `collect` of its own overrides it.
        returning: `"module:function"`, `returning(group)` lists the ranks whose results come back, the others' stay
            where they are; empty: those of every rank called.
        awaits_futures: whether `dispatch` looks into the arguments: a `Future` among them is then waited for, on the
            controller, and `dispatch` gets its result. Else it is handed on as it is, and resolved on the worker.
    """

    kind: ClassVar[str] = "dispatch_mode"
    dispatch: str
    collect: str = "list"
    returning: str = ""
    awaits_futures: bool = False

    @property
    def references(self) -> tuple[str, ...]:  # type: ignore[override]
        """Fields that are `"module:attribute"` strings, as this record uses them."""
        collect = () if self.collect in COLLECT_RULES else ("collect",)
        returning = ("returning",) if self.returning else ()
        return ("dispatch", *collect, *returning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Record):
    """Something that is one function.

    Attributes:
        function: `"module:function"`.
        requires: requirement strings that must be installed for it to run; checked without importing.
    """

    references: ClassVar[tuple[str, ...]] = ("function",)
    function: str
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze(self, "requires", tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage(Function):
    """An advantage estimator: `function(batch, **arguments) -> Batch` with an `advantages` column added.

    Attributes:
        compares_samples: whether it judges the samples of a prompt against each other, and so needs at least two.
        needs: the columns that it is given: no others are brought to the controller. None: all but texts.
    """

    kind: ClassVar[str] = "advantage"
    compares_samples: bool = False
    needs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Function):
    """A loss: `function(view: TokenView, **arguments) -> LossValue` (`enginehouse.engines.train`).

    Attributes:
        needs_actor_logprobs: arguments that, once set, need `old_logprobs` to be computed by the actor.
        always_needs_actor_logprobs: whether the loss does whatever its arguments are: it clips its ratio nearer to 1
            than the rounding of two engines leaves it.
        ratio_bounds: arguments that say how far its ratio may be from 1 before it is clipped; less than 0.05 needs the
            actor's logprobs in bfloat16.
        taken_from: config keys that arguments left unset are taken from, by argument: `rollout.sampling.max_tokens`.
        output: the output of an engine that it is computed from: `"logprobs"`, or a critic's `"values"`.
    """

    kind: ClassVar[str] = "loss"
    needs_actor_logprobs: tuple[str, ...] = ()
    always_needs_actor_logprobs: bool = False
    ratio_bounds: tuple[str, ...] = ()
    taken_from: Mapping[str, str] = field(default_factory=dict)
    output: str = "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Function):
    """A stage of a step, before the advantage: `function(batch: Batch, **arguments) -> Batch` with columns added, or
    changed, a row for each row that it is given; see docs/plugins/stage.md.

    It runs where a config names it under `stages`, or the advantage needs a column that it adds.

    Attributes:
        function: `"module:function"`. Empty: what its model computes is all that it adds.
        needs: the columns that it is given, besides its model's: no others are brought to the controller.
        adds: the columns that it adds, or changes, besides its model's. One that changes `reward` comes before a KL
            term.
        model: what a model of its own computes, which the config names as `stages.NAME.path`: `"logprobs"` of each
            token, in the column `NAME_logprobs`, or by a value head a `"score"` of each episode, in `NAME_score`, which
            is 0 but in its last row. Empty: it has none.
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
            raise TypeError(f"Stage.model is {self.model!r}; it is 'logprobs', 'score' or empty")
        if bool(self.function) != bool(self.adds) or not self.columns:
            raise TypeError("a Stage has a function and says in adds what that adds, or it has a model alone")

    @property
    def references(self) -> tuple[str, ...]:  # type: ignore[override]
        """Fields that are `"module:attribute"` strings, as this record uses them."""
        return ("function",) if self.function else ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that it adds, or changes."""
        return (*([f"{self.name}_{self.model}"] if self.model else []), *self.adds)


class Reward(Function):
    """A reward: `function(prompt, response, **columns) -> float`, run in a process pool; see docs/rewards.md."""

    __slots__ = ()
    kind: ClassVar[str] = "reward"


class Filter(Function):
    """A filter of groups: `function(group: Group, **arguments) -> bool` (`enginehouse.engines.environment`), whether it
    is trained on."""

    __slots__ = ()
    kind: ClassVar[str] = "filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker(Record):
    """What a run's metrics are sent to (`enginehouse.engines.tracker.Tracker`), by its class.

    Attributes:
        tracker: `"module:Class"`, constructed as `Class(**arguments)` with the arguments of the config. The module is
            imported by `plan`, and so leaves what it `requires` to `start`.
        requires: requirement strings that must be installed for it to run; checked without importing.
    """

    kind: ClassVar[str] = "tracker"
    references: ClassVar[tuple[str, ...]] = ("tracker",)
    tracker: str
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _freeze(self, "requires", tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Record):
    """What turns a task into episodes (`enginehouse.engines.environment.Environment`), by its class; see
    docs/plugins/environment.md.

    Attributes:
        environment: `"module:Class"`, constructed with the arguments of the config, `Class(**arguments)`.
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
    """A `"module:attribute"` string that leads nowhere."""


def resolve(reference: str) -> Any:
    """Import what a `"module:attribute"` string names.

    Raises:
        ResolveError: the string has no colon, the module cannot be imported, or it lacks the attribute; the
            cause is chained.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ResolveError(f"{reference!r} is not of the form 'module:attribute'")
    try:
        found = importlib.import_module(module_name)
    except Exception as error:
        raise ResolveError(
            f"cannot import {module_name!r} for {reference!r}: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            close = nearest(part, [name for name in dir(found) if not name.startswith("_")])
            raise ResolveError(
                f"module {module_name!r} has no {attribute!r} (asked for by {reference!r}); {close}"
            ) from None
    return found


def keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keyword arguments a function takes; None: any, or unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None  # written in C: only a call can tell
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def is_batched(function: Callable[..., Any]) -> bool:
    """Whether a reward is marked by `batched_reward`, also one whose arguments `functools.partial` fills in."""
    while isinstance(function, functools.partial) and not hasattr(function, "batched"):
        function = function.func
    return bool(getattr(function, "batched", False))


def batched_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward that scores many responses in a call: its arguments are lists, and it returns a list."""
    function.batched = True  # type: ignore[attr-defined]
    return function


def checked_reward(check: Callable[[Mapping[str, Any], Sequence[str] | None], None]) -> Callable[[F], F]:
    """Have `plan` call `check` with a reward's arguments and the names of the data's columns, None where these are not
    known; it raises `ConfigError` where a run could not go well."""

    def mark(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]
        return function

    return mark
