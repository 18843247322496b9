"""The draft of a plan, which its parts share while they check a config, and the base class of a part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from enginehouse.engines.model import ModelSpec
from enginehouse.plugin import Function, Loss, Record, configure_plugins
from enginehouse.plugin.findings import Findings
from enginehouse.plugin.secrets import check_secrets
from enginehouse_rl.config.schema import AnyConfig
from enginehouse_rl.plan.arguments import check_call, take_values
from enginehouse_rl.plan.device import cpu_has_bfloat16, pick_device, pick_dtype
from enginehouse_rl.plan.functions import FunctionCall, extend_path, find_function

if TYPE_CHECKING:
    from enginehouse.plugin import PluginManager
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse_rl.plan.parts.engines import RoleEngine

C = TypeVar("C", bound=AnyConfig, covariant=True)
P = TypeVar("P", bound="Part[Any]")
R = TypeVar("R", bound=Record)
Fact = tuple[str, str]
"""A label, and a sentence that describes the run."""


class Part(Generic[C]):
    """A section of a config, or a few sections that belong together.

    Parts settle one after another, in the order of a tuple in `enginehouse_rl.plan.plan`. A later part may read the
    attributes of an earlier part (`run[ModelPart].json`) and the draft's roles.
    """

    def __init__(self, run: Draft[C]):
        self.run, self.config, self.findings = run, run.config, run.findings
        self.refuse, self.note = run.findings.refuse, run.findings.note

    def settle(self) -> None:
        """Resolve names, fill in defaults that depend on other sections, and check the section. Problems go to the
        findings."""

    def facts(self) -> Iterable[Fact]:
        """Return the facts of the run. Called only if every part has settled without a problem."""
        return ()


class Draft(Generic[C]):
    """A config that is being turned into a plan.

    Attributes:
        findings: the problems of the config, and notes on what the user may not expect.
        device: torch device type of every engine; `device_reason` is the reason.
        dtype: the dtype that the engines compute in.
        python_path: directories from which the user's own functions are imported.
        models: `config.json` of each role that does not use the actor's model. `run[ModelPart]` has the `config.json`
            of the actor's model.
        model_key: the key or option that names the actor's model, for messages.
        model_step: the step of the run that saved the model; 0 if unknown.
        source: the name of the config in messages.
        short_paths: the short names that replace long paths in the plan's text.
    """

    def __init__(
        self,
        config: C,
        plugins: PluginManager | None,
        config_path: str | Path | None,
        resume: bool = False,
        overrides: Sequence[str] = (),
        starts: bool = True,
    ):
        switches = config.plugins
        self.config = config
        self.resume, self.overrides, self.starts = resume, overrides, starts
        self.model_key, self.model_step = "model.path", 0
        self.plugins = plugins or configure_plugins(switches.enabled, switches.blocked, switches.strict)
        self.source = f"the config {config_path}" if config_path else "the config"
        directories = [str(Path(config_path).absolute().parent)] if config_path else []
        self.python_path = tuple(dict.fromkeys([os.getcwd(), *directories]))
        extend_path(self.python_path)
        self.device, self.device_reason = pick_device(config.cluster.device)
        self.dtype = pick_dtype(config.model.dtype, self.device)
        self.findings = Findings()
        self.roles: dict[str, RolePlan] = {}
        self.engines: dict[str, RoleEngine] = {}
        self.models: dict[str, Mapping[str, Any]] = {}
        self.short_paths: dict[str, str] = {}
        self._parts: list[Part[Any]] = []
        self._check_device()

    def settle(self, parts: Iterable[type[Part[Any]]]) -> None:
        """Create the parts and let each settle, in the order of `parts`.

        Raises:
            UserError: the config has a problem. Several problems are one `ConfigError` that lists them.
        """
        for kind in parts:
            self._parts.append(part := kind(self))
            part.settle()
        self.findings.raise_problems(self.source)

    def __getitem__(self, kind: type[P]) -> P:
        """Return the part of this kind, which must have settled."""
        return next(part for part in self._parts if isinstance(part, kind))

    def facts(self, page: Sequence[str] = ()) -> tuple[Fact, ...]:
        """Return the facts of all parts. Facts with a label on `page` come first, in the order of `page`; the others
        follow in the order of the parts."""
        order = {label: number for number, label in enumerate(page)}
        facts = [(label, self.shorten(words)) for part in self._parts for label, words in part.facts()]
        return tuple(sorted(facts, key=lambda fact: order.get(fact[0], len(order))))

    def shorten(self, words: str) -> str:
        """Replace long paths in a text by their short names."""
        for path, name in self.short_paths.items():
            words = words.replace(path, name)
        return words

    def model_spec(self, path: str) -> ModelSpec:
        """Return the specification of the model in `path`, from which a role loads it."""
        model, seed = self.config.model, self.config.train.seed
        return ModelSpec(os.path.abspath(path), dtype=self.dtype, trust_remote_code=model.trust_remote_code, seed=seed)

    def records(self, kind: type[R], name: str | None = None) -> list[R]:
        """Return all records of a kind, even unusable ones. With a name, return only records that the name may refer
        to."""
        return [record for record, _ in self.plugins.providers(kind, name) if isinstance(record, kind)]

    def call(
        self,
        kind: type[Function],
        name: str,
        arguments: Mapping[str, Any],
        key: str,
        others: Sequence[str] = (),
        taken: Mapping[str, Any] | None = None,
    ) -> FunctionCall:
        """Check that a function takes the arguments that its section of the config gives it.

        Args:
            others: names of further arguments, which the function's record does not list.
            taken: further arguments, which the function's record asks for (`Loss.taken_from`). They are checked if the
                function is imported for another reason, but the function is not imported to check them.

        Returns:
            The function with all arguments except `others`. Its reference is empty if a problem was found.
        """
        within, taken = f"{key}.arguments", dict(taken or {})
        check_secrets(self.findings, within, arguments, read=False)
        with self.findings.collecting():
            reference, function = find_function(
                *(self.plugins, kind, name, f"{key}.name", self.python_path), always=bool(others), given=arguments
            )
            if function is not None:
                source = within + (" and the KL term" if kind is Loss else "")
                names = [*arguments, *others, *taken]
                called = f"{kind.kind} {name!r}"
                check_call(
                    function, within, names, source, positional=1, kind=kind.kind, called=called, values=arguments
                )
                arguments = take_values(self.findings, function, name, within, arguments)
            return FunctionCall(reference, {**arguments, **taken})
        return FunctionCall("", taken)

    def _check_device(self) -> None:
        joined = bool(self.config.cluster.address)
        if joined and self.config.cluster.device == "auto":
            self.findings.note(
                "cluster.address is set and cluster.device is auto: the devices of the cluster are known only when the "
                f"run starts. The run is planned for {self.device}, the device of this machine, and is rejected at the "
                f"start if the cluster has {'GPUs' if self.device == 'cpu' else 'no GPUs'}: set cluster.device"
            )
        if (self.device, self.dtype) == ("cpu", "bfloat16") and not joined and not cpu_has_bfloat16():
            self.findings.note(
                "model.dtype is bfloat16, but this CPU has no bfloat16 instructions: it multiplies 5 to 8 times slower "
                "than in float32 (model.dtype=float32, which takes twice the memory)"
            )
