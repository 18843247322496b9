"""Checks the engine of a role: it is installed, its options are valid, and it can do what the role needs."""

from __future__ import annotations

import ast
import difflib
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from enginehouse.engines.declared import protocols_of
from enginehouse.engines.options import EngineOptions, RolloutOptions, TrainOptions
from enginehouse.errors import ConfigError, UserError, did_you_mean, nearest
from enginehouse.plugin import Backend, ResolveError, RolloutBackend, TrainBackend, resolve
from enginehouse.plugin.capabilities import VALUE_HEAD
from enginehouse.plugin.references import find_definition, find_missing_methods
from enginehouse.plugin.secrets import check_secrets
from enginehouse.roles.role_plan import RolePlan
from enginehouse.runtimes import CURRENT, Interpreter, NoRuntime, choose_runtime
from enginehouse.weights.names import stored_shapes
from enginehouse_rl.config.load import check
from enginehouse_rl.config.migration import answer_key
from enginehouse_rl.plan.device import gpus_are_assumed
from enginehouse_rl.plan.variables import check_variables

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config.schema import EngineConfig
    from enginehouse_rl.plan.parts.draft import Draft

logger = logging.getLogger(__name__)

_FLAG = re.compile(r"--[a-z0-9][a-z0-9_-]*")


class RoleEngine:
    """The engine of a role. Problems with the engine go to the findings.

    Attributes:
        key: the role's key in the config: `"actor"`.
        record: the record of its backend; None if no such backend was found.
        options: its complete options as plain data; empty if they have a problem.
        typed: the options as an instance of the backend's class; None if they have a problem.
    """

    def __init__(
        self,
        run: Draft[Any],
        kind: type[TrainBackend] | type[RolloutBackend],
        section: EngineConfig,
        key: str,
        processes: int,
    ):
        self.run, self.kind, self.section, self.key, self.findings = run, kind, section, key, run.findings
        self.record: Backend | None = self._find()
        self.options: dict[str, Any] = {}
        self.typed: EngineOptions | None = None
        self._take_options(processes)

    @cached_property
    def interpreter(self) -> Interpreter:
        """The interpreter of the engine's workers; if the engine has a problem, the interpreter of this process."""
        interpreter = self._choose_interpreter()
        if self.typed is not None and self.typed.native:
            check_native_names(self.findings, self.typed, self.name, interpreter.python, self.key)
        return interpreter

    @property
    def name(self) -> str:
        """The backend's registered name; empty without a `record`."""
        return self.record.name if self.record else ""

    @property
    def gpus(self) -> int:
        """Number of GPUs of one replica, if the run uses GPUs; 1 if the options have a problem."""
        return self.typed.gpus() if isinstance(self.typed, RolloutOptions) else 1

    @property
    def words(self) -> str:
        """The backend's name, with the options that the config sets."""
        options = ", ".join(f"{name}={value}" for name, value in self.section.options.items())
        return f"{self.section.backend} ({options})" if options else self.section.backend

    def lacks(self, capability: str) -> bool:
        """True if the backend is known and does not have this capability."""
        return self.record is not None and capability not in self.record.capabilities

    @property
    def quantizes(self) -> bool:
        """True if the engine serves weights in fewer bits than it is sent."""
        return isinstance(self.typed, RolloutOptions) and self.typed.quantizes()

    def role(self, path: str, processes: int) -> RolePlan:
        """Return the plan of a role that runs this engine with the model in `path`, in its own processes."""
        return RolePlan(
            kind="train" if self.kind is TrainBackend else "rollout",
            backend=self.section.backend,
            options=self.options,
            model=self.run.model_spec(path),
            processes=processes,
            gpus=self.gpus,
            quantizes=self.quantizes,
            interpreter=self.interpreter,
            env=self.section.env,
        )

    def check_processes(self, processes: int, begins: str) -> None:
        """Check the options against a number of processes; the message of a problem begins with `begins`."""
        try:
            if self.typed is not None:
                self.typed.check(processes)
        except UserError as error:
            self.findings.refuse(f"{begins}: {error}{self.owner_words}")

    def check_value_head(self, role: str) -> None:
        """Check that the engine can train models with a value head, which `role` needs."""
        if self.lacks(VALUE_HEAD):
            self.findings.refuse(
                f"{role}.engine.backend: engine {self.name!r} cannot train a value head (capability {VALUE_HEAD!r}), "
                f"which a {'critic' if role == 'critic' else 'reward model'} needs"
            )

    def check_model(self, model: Mapping[str, Any], spec: ModelSpec, path_key: str = "model.path") -> None:
        """Check the options against a model and its files, unless either has a problem already."""
        if self.typed is None or not model:
            return
        self.findings.doing(f"Building {spec.path} without its weights")
        try:
            self.typed.check_model(model.get("text_config") or model)
            notes = self.typed.check_files(spec) if stored_shapes(Path(spec.path)) else ()
        except ImportError as error:  # the engine has a runtime of its own
            logger.debug("%s: the files of %s are not checked: %s", self.section.backend, spec.path, error)
        except UserError as error:
            self.findings.refuse(f"{self.key}.engine.options, {path_key}: {error}{self.owner_words}")
        else:
            for note in (f"{path_key}: {note}" for note in notes):
                if note not in self.findings.notes:  # another role with the same model may have noted it
                    self.findings.note(note)

    @property
    def owner_words(self) -> str:
        """The last words of a message about the options, which name the backend."""
        return f" (options of engine {self.record.name!r})" if self.record else ""

    def _find(self) -> Backend | None:
        """Find the backend's record, and check its devices and the methods of its engine class."""
        run, key = self.run, f"{self.key}.engine.backend"
        try:
            record = run.plugins.get(self.kind, self.section.backend, elsewhere=True)
        except UserError as error:
            self._refuse(key, error)
            return None
        if run.device not in record.devices:
            self.findings.refuse(
                f"{key}: {record.name!r} runs on {' and '.join(record.devices)}, but this run is on {run.device} "
                "(cluster.device)"
            )
        begins = f"{key}: the engine of {record.name!r}"
        try:
            definition = find_definition(record.engine)
        except ResolveError as error:
            installed = not run.plugins.missing(record)  # otherwise its runtime may have the engine
            if installed and self.section.runtime in ("auto", CURRENT):
                self.findings.refuse(f"{begins}: {error}")
            return record
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            self.findings.refuse(f"{begins}, {record.engine}, is no class")
        for protocol in protocols_of(record):
            if missing := find_missing_methods(definition, protocol):
                self.findings.refuse(
                    f"{begins}, {record.engine}, does not implement {protocol.__name__}: it lacks {', '.join(missing)}"
                )
        return record

    def _take_options(self, processes: int) -> None:
        """Check and complete the options with the backend's options class."""
        key, device = f"{self.key}.engine.options", self.run.device
        if self.record is None:
            return
        schema = _find_options_class(self.record)
        if isinstance(schema, str):
            self.findings.refuse(f"{self.key}.engine.backend: {schema}")
            return
        options, problems = check(schema, self.section.options, prefix=key, instead=partial(self._advise, schema))
        self.findings.problems += [ConfigError(problem + self.owner_words) for problem in problems]
        if isinstance(options, EngineOptions):
            self.typed = options = options.for_device(device)
            self.check_processes(processes, key)
            try:
                options.check_device(device, self.run.dtype)
            except UserError as error:
                self.findings.refuse(f"{key}: {error}{self.owner_words}")
            for surprise in options.surprises():
                self.findings.note(f"{key}: {surprise}")
        self.options = {} if options is None else options.model_dump()

    def _advise(self, options_class: type[BaseModel], option: str) -> str:
        """Return advice on an option that the backend lacks: another backend has it, or the engine itself takes it.
        `option` is the dotted name, without `engine.options`."""
        fields, first = list(options_class.model_fields), option.partition(".")[0]
        if first in fields or difflib.get_close_matches(option, fields, n=1, cutoff=0.8):
            return ""  # the option is mistyped
        owners = []
        for record in self.run.plugins.all(self.kind):
            schema = _find_options_class(record)
            if isinstance(schema, type) and first in schema.model_fields:
                owners.append(self.run.plugins.name_of(record))
        if owners:
            noun, verb = ("engine", "has") if len(owners) == 1 else ("engines", "have")
            return f"{noun} {' and '.join(map(repr, owners))} {verb} it; set {self.key}.engine.backend={owners[0]}"
        answer = answer_key(option)
        if not answer and _takes_native(options_class):
            native = f"{self.key}.engine.options.native"
            answer = f"{nearest(option, fields)}. Arguments of the engine itself belong under {native}"
        return answer

    def _choose_interpreter(self) -> Interpreter:
        """Choose the interpreter of the engine's workers, and check their options and environment variables."""
        launcher, record, device = self.run.config.cluster.launcher, self.record, self.run.device
        check_secrets(self.findings, f"{self.key}.engine.options", self.section.options, read=False)
        check_variables(self.findings, f"{self.key}.engine.env", self.section.env, launcher)
        if record is None:
            return Interpreter(CURRENT)
        if self.typed is not None and self.typed.servers():
            record = replace(record, requires=())
        automatic = self.section.runtime == "auto"
        try:
            if automatic and not record.runtimes:
                self.run.plugins.get(record.kind, self.section.backend)  # says which extra brings what is missing
            interpreter = choose_runtime(record, self.section.runtime, device)
        except UserError as error:
            if isinstance(error, NoRuntime) and gpus_are_assumed():  # the machine with the GPUs creates the runtime
                name = f"{record.name}-{device}"
                self.findings.note(f"{self.key}.engine: {error}")
                return Interpreter(name, python=name, reason="not created on this machine")
            self._refuse(f"{self.key}.engine.{'backend' if automatic else 'runtime'}", error)
            return Interpreter(CURRENT)
        if interpreter.python is not None and launcher == "inline":
            self.findings.refuse(
                f"{self.key}.engine.runtime: an inline run has one process and one interpreter, but {record.name!r} "
                f"must run in {interpreter.name} ({interpreter.reason}); set cluster.launcher=ray"
            )
        return interpreter

    def _refuse(self, key: str, error: UserError) -> None:
        error.args = (f"{key}: {error}", *error.args[1:])
        self.findings.problems.append(error)


def check_native_names(findings: Findings, options: EngineOptions, backend: str, python: str | None, key: str) -> None:
    """Reject arguments under `native` that the engine's source does not declare, if the engine is installed.

    Args:
        python: the interpreter in whose packages the engine is installed; None: this process's interpreter.
        key: the config key of the role: `"actor"`.
    """
    native_names = read_native_names(options.native_sources, python)
    for name in options.native if native_names else ():
        if name.replace("-", "_") not in native_names:
            sources = " and ".join(options.native_sources)
            hint = did_you_mean(name, native_names) or f"The arguments are declared in {sources}"  # hundreds
            findings.refuse(f"{key}.engine.options.native: the engine {backend!r} has no argument {name!r}. {hint}")


def read_native_names(sources: Sequence[str], python: str | None) -> set[str]:
    """Return the names that an engine's source declares as class fields or flags; empty if it is not installed.

    Args:
        sources: glob patterns, as in `EngineOptions.native_sources`.
        python: the interpreter in whose packages the engine is installed; None: this process's interpreter.
    """
    if python is None:
        roots = {Path(entry) for entry in sys.path}
    else:
        roots = set(Path(python).parents[1].glob("lib/python*/site-packages"))
    names: set[str] = set()
    for file in {file for root in roots for pattern in sources for file in root.glob(pattern)}:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
                names.add(node.value.removeprefix("--").replace("-", "_"))
    return names


def _find_options_class(record: Backend) -> type[BaseModel] | str:
    """Return a backend's options class, or a message that the backend has no valid options class."""
    try:
        options = resolve(record.options)
    except ResolveError as error:
        return f"the options of {record.name!r}: {error}"
    if isinstance(options, type) and issubclass(options, BaseModel):
        return options
    return (
        f"the options of {record.name!r}: {record.options} is no pydantic model; its author has to derive it from "
        f"{TrainOptions.__module__}:{TrainOptions.__name__} or {RolloutOptions.__name__}"
    )


def _takes_native(options: type[BaseModel]) -> bool:
    """True if a backend passes `native` on to its engine."""
    try:
        return bool(options.model_validate({"native": {"name": 0}}))
    except ValidationError:
        return False
