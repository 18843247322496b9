"""What `enginehouse plugins doctor` finds: each plugin is examined in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from enginehouse import __version__
from enginehouse.errors import UserError, first_line, nearest
from enginehouse.plugin import (
    CONTRACT,
    Backend,
    Placement,
    Plugin,
    PluginLookupError,
    PluginManager,
    RolloutBackend,
    TrainBackend,
)
from enginehouse.plugin import plugins as loaded_plugins
from enginehouse.plugin.capabilities import COLOCATES
from enginehouse.plugin.discovery import BLOCKED, find_installed, read_switches
from enginehouse.plugin.lookup import ambiguous_error, unknown_name_error
from enginehouse.plugin.manager import load_switched, stdout_to_stderr
from enginehouse.plugin.requirements import find_missing, install_line
from enginehouse.runtimes import CURRENT, Interpreter, RuntimeProblem, choose_runtime, find_state, list_runtimes
from enginehouse.runtimes.choosing import create_command
from enginehouse.runtimes.readiness import plugin_state
from enginehouse_rl.plan.device import pick_device
from enginehouse_testing.doctor import imports
from enginehouse_testing.doctor.trial import Candidate, Examined, examine, sources

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
STACK = ("Timeout (", "Fatal Python error")
"""What faulthandler writes before a stack."""

PLACEMENTS = {
    "in one process": Placement(colocated=True),
    "in processes of one host": Placement(colocated=False),
    "on several hosts": Placement(colocated=False, hosts=2),
    "on several hosts, with several training processes": Placement(colocated=False, hosts=2, training_ranks=2),
}
"""Where actor and rollout may be, as far as the choice of a weight transport depends on it."""


class Told(Protocol):
    """Is told what is examined, the number of that, and of how many."""

    def __call__(self, what: str, number: int, of: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that was found.

    Attributes:
        severity: `"wrong"`; or `"note"`: it costs time or lines on the terminal, and works.
        what: in words.
        where: file and line, as far as they are known.
        cure: the command that helps.
    """

    severity: Literal["wrong", "note"] = "wrong"
    what: str
    where: str = ""
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a backend finds of its requirements in a Python environment.

    Attributes:
        name: `"current"`, or a runtime's.
        state: `"ok"`, `"requirements missing"`, or what the runtime is instead: `"stale"`, `"broken"`...
        problem: why it cannot be used, in words.
        cure: the command that helps.
    """

    name: str
    state: str
    problem: str = ""
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What `auto` would choose here: a name, empty for none, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class OfRecord:
    """A record: what it says it can, and for a backend where it can run. Fields are as in `Backend`."""

    kind: str
    name: str
    capabilities: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    environments: tuple[Environment, ...] = ()
    runtime: Chosen | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """What loading a plugin did to a process.

    Attributes:
        seconds: it took.
        printed: what it printed.
        threads: names of those that it started.
        variables: names of the environment variables that it changed.
    """

    seconds: float
    printed: str
    threads: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(slots=True)
class OfPlugin:
    """A plugin.

    Attributes:
        state: as `enginehouse plugins list` has it.
        protocol: the contract version it is written for.
        loading: what loading it did; None where it did not come to an end, or was not tried.
    """

    name: str
    distribution: str
    version: str
    module: str
    state: str
    protocol: str
    loading: Loading | None
    records: list[OfRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OfPair:
    """The weight transport that a training and a rollout backend would get, by where they are."""

    train: str
    rollout: str
    where: str
    transport: Chosen


@dataclass(slots=True)
class Report:
    """All that was found.

    Attributes:
        device: torch device type that a run would use here.
        findings: what is wrong with no single plugin.
    """

    device: Chosen
    plugins: list[OfPlugin]
    transports: list[OfPair]
    findings: list[Finding]
    enginehouse: str = __version__
    contract: str = ".".join(map(str, CONTRACT))

    def count(self, severity: str) -> int:
        """Number of findings of a severity."""
        found = [*self.findings, *(one for plugin in self.plugins for one in plugin.findings)]
        return sum(one.severity == severity for one in found)


def examine_plugins(name: str | None, told: Told) -> Report:
    """Examine the plugins that a name stands for.

    Args:
        name: of a plugin, a distribution, or something that plugins declare; None: all that are installed.
        told: is told how far it is.

    Raises:
        PluginLookupError: nothing has the name.
    """
    candidates = find_installed() if name is None else _named(name)
    switches = read_switches()
    found: list[tuple[Candidate, Examined | None]] = []
    for number, candidate in enumerate(candidates, 1):
        told(candidate[0].name, number, len(candidates))
        found.append((candidate, None if switches.refusal(candidate[0]) else examine(candidate)))
    manager = _loaded_without_harm(found)
    device = Chosen(*pick_device("auto"))
    reports = []
    for number, (candidate, examined) in enumerate(found, 1):
        plugin = next(one for one in manager.plugins if _same(one, candidate[0]))
        examination = _Examination(manager, plugin, candidate, examined, device.name)
        reports.append(examination.report(partial(told, number=number, of=len(found))))
    transports = list(_transports(manager, device.name, reports))
    findings = [
        Finding(what=f"no weight transport can be picked for {one.train} and {one.rollout} {one.where}: {said}")
        for one in transports
        if not one.transport.name and (said := one.transport.why)
    ]
    return Report(device, reports, transports, findings)


def _loaded_without_harm(found: Sequence[tuple[Candidate, Examined | None]]) -> PluginManager:
    """Load all plugins but those that could not be loaded in their own process; these have what was found there."""
    bad = {candidate[0].name: examined for candidate, examined in found if examined and _fails(examined)}
    switches = read_switches()
    manager = load_switched(replace(switches, blocked=(*switches.blocked, *bad)))
    for plugin in manager.plugins:
        if (examined := bad.get(plugin.name)) is not None:
            said = examined.loaded or {"status": "broken", "problem": f"{examined.problem}; so it is not loaded"}
            for name in ("status", "problem", "traceback", "protocol"):
                setattr(plugin, name, said.get(name, ""))
    return manager


def _fails(examined: Examined) -> bool:
    """Return whether a plugin could not be loaded in its own process."""
    return examined.loaded.get("status", "broken") != "ok"


def _named(name: str) -> list[Candidate]:
    """The installed plugins that a name stands for; none but those of that name are imported where it is a plugin's."""
    candidates = find_installed()
    if named := [one for one in candidates if one[0].answers_to(name)]:
        return named
    manager = loaded_plugins()
    owners = [provided.plugin for provided in manager.providers(name=name)]
    owners += [plugin for plugin in manager.plugins if any(name == withdrawn for _, withdrawn in plugin.withdrawn)]
    if not owners:
        plugins = [one for one in manager.plugins if any(_same(one, other) for other, _ in candidates)]
        raise unknown_name_error(name, plugins, [one for one in manager.providers() if one.plugin in plugins])
    if named := [one for one in candidates if any(_same(one[0], owner) for owner in owners)]:
        return named
    others = nearest(name, [plugin.name for plugin, _ in candidates])
    raise PluginLookupError(f"{name!r} is of enginehouse itself, which is not examined; {others}", "unknown")


def _same(one: Plugin, other: Plugin) -> bool:
    return (one.distribution, one.name) == (other.distribution, other.name)


@dataclass
class _Examination:
    """Puts together what is known of one plugin.

    Attributes:
        manager: has all plugins loaded.
        plugin: as the manager has it.
        candidate: the plugin and its entry point.
        examined: what was found in the other process; None where it is blocked, or no process could be started.
        device: torch device type of a run here.
    """

    manager: PluginManager
    plugin: Plugin
    candidate: Candidate
    examined: Examined | None
    device: str

    def report(self, told: Callable[[str], None]) -> OfPlugin:
        """All of it; `told` is told what is examined in another Python environment."""
        plugin = self.plugin
        report = OfPlugin(
            plugin.name,
            plugin.distribution,
            plugin.version,
            plugin.module,
            plugin_state(self.manager, plugin),
            plugin.protocol,
            self._loading(),
        )
        if plugin.status == "blocked":
            return report
        findings = [*self._of_loading(), *self._of_distribution(), *self._of_imports()]
        if plugin.status == "ok":
            findings += self._of_records()
            for record in plugin.records:
                report.records.append(self._record(record, findings, told))
            findings += self._of_names()
        report.findings = list(dict.fromkeys(findings))
        return report

    @property
    def blocking(self) -> str:
        """The command that keeps the plugin out."""
        names = [one.name for one in self.manager.plugins]
        return (
            f"export {BLOCKED}={self.plugin.name if names.count(self.plugin.name) == 1 else self.plugin.distribution}"
        )

    @property
    def upgrading(self) -> str:
        """The command that brings a newer plugin, if there is one."""
        return f"pip install --upgrade {self.plugin.distribution}"

    @property
    def file(self) -> str:
        """The plugin's module, or the outermost package of it."""
        files = sources(self.candidate[1].module)
        own = [one for one in files if ".".join(one.with_suffix("").parts).endswith(self.candidate[1].module)]
        return str((own or files)[0]) if files else ""

    def _of_loading(self) -> Iterator[Finding]:
        plugin, examined = self.plugin, self.examined
        if plugin.status == "incompatible":
            yield Finding(what=plugin.problem, where=self.file, cure=self._other_contract())
        elif plugin.status == "broken" and plugin.traceback:
            frame = self._frame(plugin.traceback, own=True) or self._hook(plugin.problem)
            yield Finding(what=plugin.problem, where=frame, cure=self.blocking)
        elif plugin.status == "broken":
            yield Finding(what=plugin.problem, where=self._stack(), cure=self.blocking)
        if examined is None:
            yield Finding(severity="note", what="no process could be started to examine it in")
            return
        for warning in examined.loaded.get("warnings", ()):
            yield Finding(what=warning, where=self.file, cure=self.blocking)
        for note in self._notes(examined.loaded):
            yield Finding(severity="note", what=note, where=self.file, cure=self.blocking)

    def _loading(self) -> Loading | None:
        if self.examined is None or "seconds" not in self.examined.loaded:
            return None
        said = self.examined.loaded
        printed = self.examined.output.encode()[: said["printed"]].decode(errors="replace")
        return Loading(said["seconds"], printed, tuple(said["threads"]), tuple(said["variables"]))

    def _notes(self, said: Mapping[str, Any]) -> Iterator[str]:
        """What loading the plugin did that it need not."""
        if said.get("note"):
            yield said["note"]
        if loading := self._loading():
            if lines := loading.printed.splitlines():
                more = f" and {len(lines) - 1} more lines" if lines[1:] else ""
                yield f"it prints where it is loaded: {lines[0]!r}{more}"
            if loading.threads:
                yield f"it starts threads where it is loaded: {', '.join(loading.threads)}"
            if loading.variables:
                yield f"it changes environment variables where it is loaded: {', '.join(loading.variables)}"
        for (kind, name), heavy in zip(said.get("records", ()), said.get("heavy", ())):
            if heavy:
                yield f"{kind} {name!r}: importing its options brings {', '.join(heavy)}: every `plan` waits for that"

    def _of_distribution(self) -> Iterator[Finding]:
        """What the distribution requires and is not installed: pip would have brought it."""
        try:
            required = metadata.requires(self.plugin.distribution) or []
            missing = list(find_missing(required))
        except (metadata.PackageNotFoundError, ValueError):
            return
        for one in missing:
            cure = install_line([one], self.plugin.distribution)
            yield Finding(what=f"{self.plugin} {one}", where=self.file, cure=cure)

    def _of_imports(self) -> Iterator[Finding]:
        """What it imports of enginehouse that the contract lacks, and of others that are not required."""
        if imports.is_own(self.plugin):
            return
        module = self.candidate[1].module
        found = list(imports.imports_of(sources(module)))
        for one in found:
            fails, said = imports.off_contract(one)
            if said:
                yield Finding(severity="wrong" if fails else "note", what=said, where=one.where, cure=self.upgrading)
        for one, distribution in imports.unrequired(self.plugin, module.partition(".")[0], found):
            what = f"it imports {one.module}, which {self.plugin.distribution} does not require"
            cure = f'dependencies = ["{distribution}"]'
            yield Finding(severity="note", what=what, where=one.where, cure=f"{cure} in its pyproject.toml")

    def _of_records(self) -> Iterator[Finding]:
        """What is wrong with what its records name, by what was found in the other process."""
        if self.examined is None:
            return
        yield from self._faults(self.examined, lambda record: True)

    def _faults(
        self, examined: Examined, wanted: Callable[[tuple[str, str]], bool], runtime: str = ""
    ) -> Iterator[Finding]:
        inside = f"in runtime {runtime}: " if runtime else ""
        names = [(kind, name) for kind, name in examined.loaded.get("records", ())]
        for record, answer in zip(names, examined.answers):
            for fault in answer["faults"] if wanted(record) else ():
                yield Finding(what=inside + fault["what"], where=fault["where"] or self.file, cure=self.upgrading)
        if examined.problem:
            what = "{} {!r}".format(*names[len(examined.answers)]) if len(examined.answers) < len(names) else "it"
            yield Finding(
                what=f"{inside}importing what {what} names: {examined.problem}",
                where=self._frame(_stack_of(examined.output)) or self.file,
                cure=self.upgrading,
            )

    def _record(self, record: Any, findings: list[Finding], told: Callable[[str], None]) -> OfRecord:
        capabilities = tuple(sorted(getattr(record, "capabilities", ())))
        if not isinstance(record, Backend):
            if missing := self.manager.missing(record):
                what = f"{record.kind} {record.name!r} {'; '.join(map(str, missing))}"
                findings.append(
                    Finding(what=what, where=self.file, cure=install_line(missing, self.plugin.distribution))
                )
            return OfRecord(record.kind, record.name, capabilities, getattr(record, "requires", ()))
        environments = tuple(self._environments(record))
        interpreter, chosen = _choice(record, self.device)
        if interpreter is None:
            findings += self._unusable(record, environments, chosen)
        elif interpreter.python is not None:
            findings += self._in_runtime(record, interpreter, told)
        for one in environments[1:]:
            if one.state not in ("ok", "being made"):
                severity: Literal["wrong", "note"] = "note" if interpreter else "wrong"
                what = f"runtime {one.name} of {record.kind} {record.name!r} is {one.state}: {one.problem}"
                findings.append(Finding(severity=severity, what=what, cure=one.cure))
        return OfRecord(record.kind, record.name, capabilities, record.requires, record.devices, environments, chosen)

    def _environments(self, record: Backend) -> Iterator[Environment]:
        """How the requirements of a backend are met here, and in each runtime of its own."""
        missing = self.manager.missing(record)
        cure = install_line(missing, self.plugin.distribution) if missing else ""
        said = "; ".join(map(str, missing))
        yield Environment(CURRENT, "requirements missing" if missing else "ok", said, cure)
        for runtime in list_runtimes():
            if runtime.manifest is None or runtime.manifest.backend != record.name:
                continue
            state = find_state(runtime, record)
            lacks = list(find_missing(record.requires, [str(runtime.packages)])) if state.word == "ok" else []
            if lacks:
                yield Environment(runtime.name, "requirements missing", "; ".join(map(str, lacks)))
            else:
                yield Environment(runtime.name, state.word, state.problem, state.cure)

    def _unusable(self, record: Backend, environments: Sequence[Environment], chosen: Chosen) -> Iterator[Finding]:
        here = environments[0]
        what = f"{record.kind} {record.name!r}"
        if self.device not in record.devices:
            yield Finding(severity="note", what=f"{what}: {chosen.why}")
        elif here.problem:
            makes = create_command(record.name, self.device) if self.device in record.runtimes else here.cure
            yield Finding(what=f"{what} {here.problem}", where=self.file, cure=makes)
        else:
            yield Finding(what=f"{what}: {chosen.why}", where=self.file)

    def _in_runtime(self, record: Backend, interpreter: Interpreter, told: Callable[[str], None]) -> Iterator[Finding]:
        """What is wrong with a backend's engine where it would run: it was passed over here."""
        told(f"{self.plugin.name} in {interpreter.name}")
        examined = examine(self.candidate, interpreter.python, interpreter.env)
        if examined is None:
            what = f"the interpreter of runtime {interpreter.name} cannot be started"
            yield Finding(what=what, cure=f"enginehouse runtime doctor {interpreter.name}")
            return
        if examined.loaded.get("problem"):
            what = f"in runtime {interpreter.name}: the plugin cannot be loaded: {examined.loaded['problem']}"
            yield Finding(what=what, where=self.file, cure=self.upgrading)
        yield from self._faults(examined, lambda one: one == (record.kind, record.name), interpreter.name)

    def _of_names(self) -> Iterator[Finding]:
        """Names that another distribution offers too."""
        for record in self.plugin.records:
            providers = self.manager.providers(record.kind, record.name)
            if len(providers) > 1:
                said = str(ambiguous_error(record.kind, record.name, providers))
                yield Finding(what=said, where=self.file, cure=self.blocking)

    def _other_contract(self) -> str:
        """The command that brings the side of the contract that is older up to the other."""
        try:
            newer = tuple(map(int, self.plugin.protocol.split("."))) > CONTRACT
        except ValueError:
            newer = False
        return "pip install --upgrade enginehouse" if newer else self.upgrading

    def _stack(self) -> str:
        stack = _stack_of(self.examined.output) if self.examined else ""
        return (self._frame(stack) if stack else "") or self.file

    def _frame(self, stack: str, own: bool = False) -> str:
        """The innermost line of a stack that is of the plugin's own files; empty for none.

        Args:
            stack: as Python writes it, innermost last; of faulthandler, innermost first.
            own: whether another's line will not do where there is none.
        """
        frames = FRAME.findall(stack)
        if not stack.startswith(STACK):
            frames.reverse()
        files = {str(one) for one in sources(self.candidate[1].module)}
        found = [frame for frame in frames if frame[0] in files] or ([] if own else frames)
        return ":".join(found[0]) if found else ""

    def _hook(self, problem: str) -> str:
        """Where the hook begins that a problem names; the plugin's module where it names none."""
        path = Path(self.file or os.devnull)
        for name in re.findall(r"\benginehouse_\w+", problem):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if re.match(rf"\s*(async )?def {name}\b", line):
                    return f"{path}:{number}"
        return self.file


def _stack_of(output: str) -> str:
    """What faulthandler wrote last; empty where it wrote nothing."""
    begins = max(output.rfind(word) for word in STACK)
    return output[begins:] if begins >= 0 else ""


def _choice(record: Backend, device: str) -> tuple[Interpreter | None, Chosen]:
    """What `engine.runtime=auto` is here for a backend; None where it is nothing."""
    if device not in record.devices:
        return None, Chosen("", f"it runs on {' and '.join(record.devices)}, and a run here would be on {device}")
    try:
        interpreter = choose_runtime(record, "auto", device)
    except RuntimeProblem as error:
        return None, Chosen("", str(error))
    return interpreter, Chosen(interpreter.name, interpreter.reason)


def _transports(manager: PluginManager, device: str, examined: Sequence[OfPlugin]) -> Iterator[OfPair]:
    """What would carry weights between backends that can run here, one of them of a plugin that was examined."""
    owners = [(plugin.distribution, plugin.name) for plugin in examined]
    usable: list[tuple[Any, Interpreter, bool]] = []
    for kind in (TrainBackend, RolloutBackend):
        for record, plugin in manager.providers(kind):
            interpreter, _ = _choice(cast(Backend, record), device)
            if interpreter is not None:
                usable.append((record, interpreter, (plugin.distribution, plugin.name) in owners))
    for (train, of_train, train_asked), (rollout, of_rollout, rollout_asked) in product(usable, usable):
        if (train.kind, rollout.kind) != ("train", "rollout") or not (train_asked or rollout_asked):
            continue
        for where, placement in PLACEMENTS.items():
            shared = of_train.name == of_rollout.name and COLOCATES in rollout.capabilities
            if shared or not placement.colocated:
                picked = _picked(manager, train, rollout, replace(placement, device=device))
                yield OfPair(manager.name_of(train), manager.name_of(rollout), where, picked)


def _picked(manager: PluginManager, train: TrainBackend, rollout: RolloutBackend, placement: Placement) -> Chosen:
    try:
        with stdout_to_stderr():
            picked = manager.pick_transport(train, rollout, placement)
    except (Exception, SystemExit) as error:  # a plugin's hook may raise anything
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        return Chosen("", said)
    return Chosen(manager.name_of(picked), f"it reaches {', '.join(sorted(picked.capabilities))}")
