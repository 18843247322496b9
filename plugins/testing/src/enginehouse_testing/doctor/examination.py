"""Examines plugins for `enginehouse plugins doctor`, each in its own process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

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
"""Words that begin a stack written by faulthandler."""

PLACEMENTS = {
    "in one process": Placement(colocated=True),
    "in processes of one host": Placement(colocated=False),
    "on several hosts": Placement(colocated=False, hosts=2),
    "on several hosts, with several training processes": Placement(colocated=False, hosts=2, training_ranks=2),
}
"""Placements of actor and rollout on which the choice of a weight transport depends."""


Begins = Callable[[str, int, int], None]
"""Called before each examination, with its subject, its number, and the number of plugins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong with a plugin.

    Attributes:
        severity: `"wrong"`, or `"note"` for something that works but costs time or prints lines on the terminal.
        where: file and line, as far as they are known.
        cure: the command that helps.
    """

    severity: Literal["wrong", "note"] = "wrong"
    what: str
    where: str = ""
    cure: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeReadiness:
    """The state of a Python environment for a backend.

    Attributes:
        name: `"current"`, or the name of a runtime.
        state: `"ok"`, `"requirements missing"`, or the runtime's state: `"stale"`, `"broken"`...
        problem: the reason why the environment cannot be used.
        cure: the command that helps.
    """

    name: str
    state: str
    problem: str = ""
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice that `auto` makes on this machine: a name, empty if nothing fits, and the reason."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class RecordReport:
    """A record, with the environments that a backend can run in. Fields are as in `Backend`."""

    kind: str
    name: str
    capabilities: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    environments: tuple[RuntimeReadiness, ...] = ()
    runtime: Chosen | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """Side effects of loading a plugin.

    Attributes:
        printed: text that the plugin printed.
        threads: names of the threads that the plugin started.
        variables: names of the environment variables that the plugin changed.
    """

    seconds: float
    printed: str
    threads: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(slots=True)
class PluginReport:
    """A plugin, with its records and findings.

    Attributes:
        state: state as in `enginehouse plugins list`.
        protocol: the contract version that the plugin is written for.
        loading: side effects of loading the plugin; None if it was not loaded, or loading did not end.
    """

    name: str
    distribution: str
    version: str
    module: str
    state: str
    protocol: str
    loading: Loading | None
    records: list[RecordReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PairReport:
    """The weight transport that a training and a rollout backend would get at one placement."""

    train: str
    rollout: str
    where: str
    transport: Chosen


@dataclass(slots=True)
class ExaminationReport:
    """The result of an examination.

    Attributes:
        device: torch device type of a run here.
        findings: findings that do not belong to a single plugin.
    """

    device: Chosen
    plugins: list[PluginReport]
    transports: list[PairReport]
    findings: list[Finding]
    enginehouse: str = __version__
    contract: str = ".".join(map(str, CONTRACT))

    def count(self, severity: str) -> int:
        """Return the number of findings of a severity."""
        findings = [*self.findings, *(finding for plugin in self.plugins for finding in plugin.findings)]
        return sum(finding.severity == severity for finding in findings)


def examine_plugins(name: str | None, begins: Begins) -> ExaminationReport:
    """Examine the plugins that a name refers to.

    Args:
        name: name of a plugin, a distribution, or a record of a plugin; None: all installed plugins.
        begins: called before each examination.

    Raises:
        PluginLookupError: nothing has this name.
    """
    candidates = find_installed() if name is None else _find_candidates(name)
    switches = read_switches()
    examinations: list[tuple[Candidate, Examined | None]] = []
    for number, candidate in enumerate(candidates, 1):
        begins(candidate[0].name, number, len(candidates))
        examinations.append((candidate, None if switches.refusal(candidate[0]) else examine(candidate)))
    manager = _load_harmless(examinations)
    device = Chosen(*pick_device("auto"))
    reports = []
    for number, (candidate, examined) in enumerate(examinations, 1):
        plugin = next(plugin for plugin in manager.plugins if _same(plugin, candidate[0]))
        examination = _Examination(manager, plugin, candidate, examined, device.name)
        reports.append(examination.report(lambda what, number=number: begins(what, number, len(candidates))))  # type: ignore[misc]
    transports = list(_pick_transports(manager, device.name, reports))
    findings = [
        Finding(what=f"no weight transport can be picked for {pair.train} and {pair.rollout} {pair.where}: {why}")
        for pair in transports
        if not pair.transport.name and (why := pair.transport.why)
    ]
    return ExaminationReport(device, reports, transports, findings)


def _load_harmless(examinations: Sequence[tuple[Candidate, Examined | None]]) -> PluginManager:
    """Load all plugins except the plugins that failed in the examination. Failed plugins get the state that the
    examination found."""
    bad = {
        candidate[0].name: examined
        for candidate, examined in examinations
        if examined and examined.loaded.get("status", "broken") != "ok"
    }
    switches = read_switches()
    manager = load_switched(replace(switches, blocked=(*switches.blocked, *bad)))
    for plugin in manager.plugins:
        if (examined := bad.get(plugin.name)) is not None:
            state = examined.loaded or {"status": "broken", "problem": f"{examined.problem}; so it is not loaded"}
            for name in ("status", "problem", "traceback", "protocol"):
                setattr(plugin, name, state.get(name, ""))
    return manager


def _find_candidates(name: str) -> list[Candidate]:
    """Return the installed plugins that a name refers to. If a plugin has this name, nothing is imported."""
    candidates = find_installed()
    if named := [candidate for candidate in candidates if candidate[0].answers_to(name)]:
        return named
    manager = loaded_plugins()
    owners = [provided.plugin for provided in manager.providers(name=name)]
    owners += [plugin for plugin in manager.plugins if any(name == withdrawn for _, withdrawn in plugin.withdrawn)]
    if not owners:
        plugins = [plugin for plugin in manager.plugins if any(_same(plugin, candidate) for candidate, _ in candidates)]
        providers = [provided for provided in manager.providers() if provided.plugin in plugins]
        raise unknown_name_error(name, plugins, providers)
    if named := [candidate for candidate in candidates if any(_same(candidate[0], owner) for owner in owners)]:
        return named
    others = nearest(name, [plugin.name for plugin, _ in candidates])
    raise PluginLookupError(f"{name!r} is part of enginehouse itself, which is not examined. {others}", "unknown")


def _same(first: Plugin, second: Plugin) -> bool:
    return (first.distribution, first.name) == (second.distribution, second.name)


@dataclass
class _Examination:
    """Collects the findings about one plugin.

    Attributes:
        manager: has all plugins loaded.
        plugin: the plugin as the manager describes it.
        candidate: the plugin and its entry point.
        examined: result of the other process; None if the plugin is blocked, or no process could be started.
        device: torch device type of a run here.
    """

    manager: PluginManager
    plugin: Plugin
    candidate: Candidate
    examined: Examined | None
    device: str

    def report(self, begins: Callable[[str], None]) -> PluginReport:
        """Return the plugin's report; `begins` is called before an examination in another Python environment."""
        plugin = self.plugin
        state, loading = plugin_state(self.manager, plugin), self._loading()
        report = PluginReport(
            plugin.name, plugin.distribution, plugin.version, plugin.module, state, plugin.protocol, loading
        )
        if plugin.status == "blocked":
            return report
        findings = [*self._check_loading(), *self._check_distribution(), *self._check_imports()]
        if plugin.status == "ok":
            if self.examined is not None:
                findings += self._faults(self.examined, lambda record: True)
            for record in plugin.records:
                report.records.append(self._report_record(record, findings, begins))
            findings += self._check_names()
        report.findings = list(dict.fromkeys(findings))
        return report

    @property
    def blocking(self) -> str:
        """Command that blocks the plugin."""
        name, names = self.plugin.name, [plugin.name for plugin in self.manager.plugins]
        return f"export {BLOCKED}={name if names.count(name) == 1 else self.plugin.distribution}"

    @property
    def upgrading(self) -> str:
        """Command that installs a newer version of the plugin, if there is one."""
        return f"pip install --upgrade {self.plugin.distribution}"

    @property
    def file(self) -> str:
        """File of the plugin's module, or the first file of its outermost package."""
        files = sources(self.candidate[1].module)
        module_files = [
            file for file in files if ".".join(file.with_suffix("").parts).endswith(self.candidate[1].module)
        ]
        return str((module_files or files)[0]) if files else ""

    def _check_loading(self) -> Iterator[Finding]:
        plugin, examined = self.plugin, self.examined
        if plugin.status == "incompatible":
            yield Finding(what=plugin.problem, where=self.file, cure=self._upgrade_for_contract())
        elif plugin.status == "broken" and plugin.traceback:
            frame = self._find_frame(plugin.traceback, own=True) or self._find_hook(plugin.problem)
            yield Finding(what=plugin.problem, where=frame, cure=self.blocking)
        elif plugin.status == "broken":
            stack = _stack_of(self.examined.output) if self.examined else ""
            where = (self._find_frame(stack) if stack else "") or self.file
            yield Finding(what=plugin.problem, where=where, cure=self.blocking)
        if examined is None:
            yield Finding(severity="note", what="no process could be started to examine the plugin")
            return
        for warning in examined.loaded.get("warnings", ()):
            yield Finding(what=warning, where=self.file, cure=self.blocking)
        for note in self._notes(examined.loaded):
            yield Finding(severity="note", what=note, where=self.file, cure=self.blocking)

    def _loading(self) -> Loading | None:
        if self.examined is None or "seconds" not in self.examined.loaded:
            return None
        loaded = self.examined.loaded
        printed = self.examined.output.encode()[: loaded["printed"]].decode(errors="replace")
        return Loading(loaded["seconds"], printed, tuple(loaded["threads"]), tuple(loaded["variables"]))

    def _notes(self, loaded: Mapping[str, Any]) -> Iterator[str]:
        """Yield side effects that the plugin should not have while it is loaded."""
        if loaded.get("note"):
            yield loaded["note"]
        if loading := self._loading():
            if lines := loading.printed.splitlines():
                more = f" and {len(lines) - 1} more lines" if lines[1:] else ""
                yield f"it prints while it is loaded: {lines[0]!r}{more}"
            if loading.threads:
                yield f"it starts threads while it is loaded: {', '.join(loading.threads)}"
            if loading.variables:
                yield f"it changes environment variables while it is loaded: {', '.join(loading.variables)}"
        for (kind, name), heavy in zip(loaded.get("records", ()), loaded.get("heavy", ())):
            if heavy:
                yield f"{kind} {name!r}: its options import {', '.join(heavy)}, which makes every `plan` slow"

    def _check_distribution(self) -> Iterator[Finding]:
        """Yield requirements of the distribution that are not installed, although pip would have installed them."""
        try:
            required = metadata.requires(self.plugin.distribution) or []
            missing = list(find_missing(required))
        except (metadata.PackageNotFoundError, ValueError):
            return
        for requirement in missing:
            cure = install_line([requirement], self.plugin.distribution)
            yield Finding(what=f"{self.plugin} {requirement}", where=self.file, cure=cure)

    def _check_imports(self) -> Iterator[Finding]:
        """Yield imports that the contract lacks, and imports from distributions that the plugin does not require."""
        if imports.is_own(self.plugin):
            return
        module = self.candidate[1].module
        imported_names = list(imports.imports_of(sources(module)))
        for imported in imported_names:
            fails, what = imports.off_contract(imported)
            if what:
                severity: Literal["wrong", "note"] = "wrong" if fails else "note"
                yield Finding(severity=severity, what=what, where=imported.where, cure=self.upgrading)
        for imported, distribution in imports.unrequired(self.plugin, module.partition(".")[0], imported_names):
            what = f"it imports {imported.module}, which {self.plugin.distribution} does not require"
            cure = f'dependencies = ["{distribution}"] in its pyproject.toml'
            yield Finding(severity="note", what=what, where=imported.where, cure=cure)

    def _faults(
        self, examined: Examined, is_examined: Callable[[tuple[str, str]], bool], runtime: str = ""
    ) -> Iterator[Finding]:
        """Yield the mistakes that the other process found in code named by the records."""
        inside = f"in runtime {runtime}: " if runtime else ""
        names = [(kind, name) for kind, name in examined.loaded.get("records", ())]
        for record, answer in zip(names, examined.answers):
            for fault in answer["faults"] if is_examined(record) else ():
                yield Finding(what=inside + fault["what"], where=fault["where"] or self.file, cure=self.upgrading)
        if examined.problem:
            what = "{} {!r}".format(*names[len(examined.answers)]) if len(examined.answers) < len(names) else "it"
            yield Finding(
                what=f"{inside}importing what {what} names: {examined.problem}",
                where=self._find_frame(_stack_of(examined.output)) or self.file,
                cure=self.upgrading,
            )

    def _report_record(self, record: Any, findings: list[Finding], begins: Callable[[str], None]) -> RecordReport:
        """Return a record's report, and add the record's mistakes to the findings."""
        capabilities = tuple(sorted(getattr(record, "capabilities", ())))
        if not isinstance(record, Backend):
            if missing := self.manager.missing(record):
                what = f"{record.kind} {record.name!r} {'; '.join(map(str, missing))}"
                cure = install_line(missing, self.plugin.distribution)
                findings.append(Finding(what=what, where=self.file, cure=cure))
            return RecordReport(record.kind, record.name, capabilities, getattr(record, "requires", ()))
        environments = tuple(self._environments(record))
        interpreter, chosen = _choose_interpreter(record, self.device)
        if interpreter is None:
            findings += self._check_unusable(record, environments[0], chosen)
        elif interpreter.python is not None:
            findings += self._check_in_runtime(record, interpreter, begins)
        for runtime in environments[1:]:
            if runtime.state not in ("ok", "being made"):
                severity: Literal["wrong", "note"] = "note" if interpreter else "wrong"
                what = f"runtime {runtime.name} of {record.kind} {record.name!r} is {runtime.state}: {runtime.problem}"
                findings.append(Finding(severity=severity, what=what, cure=runtime.cure))
        return RecordReport(
            record.kind, record.name, capabilities, record.requires, record.devices, environments, chosen
        )

    def _environments(self, record: Backend) -> Iterator[RuntimeReadiness]:
        """Yield the state of this environment, and of each of the backend's own runtimes."""
        missing = self.manager.missing(record)
        cure = install_line(missing, self.plugin.distribution) if missing else ""
        problem = "; ".join(map(str, missing))
        yield RuntimeReadiness(CURRENT, "requirements missing" if missing else "ok", problem, cure)
        for runtime in list_runtimes():
            if runtime.manifest is None or runtime.manifest.backend != record.name:
                continue
            state = find_state(runtime, record)
            lacks = list(find_missing(record.requires, [str(runtime.packages)])) if state.word == "ok" else []
            if lacks:
                yield RuntimeReadiness(runtime.name, "requirements missing", "; ".join(map(str, lacks)))
            else:
                yield RuntimeReadiness(runtime.name, state.word, state.problem, state.cure)

    def _check_unusable(self, record: Backend, here: RuntimeReadiness, chosen: Chosen) -> Iterator[Finding]:
        """Yield the reason why a backend cannot run in this environment or in a runtime."""
        what = f"{record.kind} {record.name!r}"
        if self.device not in record.devices:
            yield Finding(severity="note", what=f"{what}: {chosen.why}")
        elif here.problem:
            makes = create_command(record.name, self.device) if self.device in record.runtimes else here.cure
            yield Finding(what=f"{what} {here.problem}", where=self.file, cure=makes)
        else:
            yield Finding(what=f"{what}: {chosen.why}", where=self.file)

    def _check_in_runtime(
        self, record: Backend, interpreter: Interpreter, begins: Callable[[str], None]
    ) -> Iterator[Finding]:
        """Yield the mistakes of a backend's engine in the runtime that a run would use."""
        begins(f"{self.plugin.name} in {interpreter.name}")
        examined = examine(self.candidate, interpreter.python, interpreter.env)
        if examined is None:
            what = f"the interpreter of runtime {interpreter.name} cannot be started"
            yield Finding(what=what, cure=f"enginehouse runtime doctor {interpreter.name}")
            return
        if examined.loaded.get("problem"):
            what = f"in runtime {interpreter.name}: the plugin cannot be loaded: {examined.loaded['problem']}"
            yield Finding(what=what, where=self.file, cure=self.upgrading)
        yield from self._faults(examined, lambda named: named == (record.kind, record.name), interpreter.name)

    def _check_names(self) -> Iterator[Finding]:
        """Yield a finding for each record of the plugin whose name another distribution offers too."""
        for record in self.plugin.records:
            providers = self.manager.providers(record.kind, record.name)
            if len(providers) > 1:
                what = str(ambiguous_error(record.kind, record.name, providers))
                yield Finding(what=what, where=self.file, cure=self.blocking)

    def _upgrade_for_contract(self) -> str:
        """Return the command that upgrades enginehouse or the plugin, whichever has the older contract version."""
        try:
            newer = tuple(map(int, self.plugin.protocol.split("."))) > CONTRACT
        except ValueError:
            newer = False
        return "pip install --upgrade enginehouse" if newer else self.upgrading

    def _find_frame(self, stack: str, own: bool = False) -> str:
        """Return the innermost frame in the plugin's own files, as `file:line`; empty if there is none.

        Args:
            stack: a stack as Python writes it, innermost last, or as faulthandler does, innermost first.
            own: True to return no frame of other files.
        """
        frames = FRAME.findall(stack)
        if not stack.startswith(STACK):
            frames.reverse()
        files = {str(file) for file in sources(self.candidate[1].module)}
        fitting = [frame for frame in frames if frame[0] in files] or ([] if own else frames)
        return ":".join(fitting[0]) if fitting else ""

    def _find_hook(self, problem: str) -> str:
        """Return the file and line of the hook that a problem names, or the file of the plugin's module."""
        path = Path(self.file or os.devnull)
        for name in re.findall(r"\benginehouse_\w+", problem):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if re.match(rf"\s*(async )?def {name}\b", line):
                    return f"{path}:{number}"
        return self.file


def _stack_of(output: str) -> str:
    """Return the last stack of faulthandler, or empty."""
    begins = max(output.rfind(word) for word in STACK)
    return output[begins:] if begins >= 0 else ""


def _choose_interpreter(record: Backend, device: str) -> tuple[Interpreter | None, Chosen]:
    """Return the interpreter that `engine.runtime=auto` chooses for a backend here, or None, and the choice."""
    if device not in record.devices:
        return None, Chosen("", f"it runs on {' and '.join(record.devices)}, but a run here would be on {device}")
    try:
        interpreter = choose_runtime(record, "auto", device)
    except RuntimeProblem as error:
        return None, Chosen("", str(error))
    return interpreter, Chosen(interpreter.name, interpreter.reason)


def _pick_transports(manager: PluginManager, device: str, examined: Sequence[PluginReport]) -> Iterator[PairReport]:
    """Yield the transport for each pair of backends that can run here. An examined plugin must declare at least one of
    the two backends."""
    owners = [(plugin.distribution, plugin.name) for plugin in examined]
    usable: list[tuple[Any, Interpreter, bool]] = []
    for kind in (TrainBackend, RolloutBackend):
        for record, plugin in manager.providers(kind):
            interpreter, _ = _choose_interpreter(cast(Backend, record), device)
            if interpreter is not None:
                usable.append((record, interpreter, (plugin.distribution, plugin.name) in owners))
    for (train, train_runs_in, train_examined), (rollout, rollout_runs_in, rollout_examined) in product(usable, usable):
        if (train.kind, rollout.kind) != ("train", "rollout") or not (train_examined or rollout_examined):
            continue
        for where, placement in PLACEMENTS.items():
            shared = train_runs_in.name == rollout_runs_in.name and COLOCATES in rollout.capabilities
            if shared or not placement.colocated:
                picked = _pick_transport(manager, train, rollout, replace(placement, device=device))
                yield PairReport(manager.name_of(train), manager.name_of(rollout), where, picked)


def _pick_transport(
    manager: PluginManager, train: TrainBackend, rollout: RolloutBackend, placement: Placement
) -> Chosen:
    try:
        with stdout_to_stderr():
            picked = manager.pick_transport(train, rollout, placement)
    except (Exception, SystemExit) as error:  # a plugin's hook may raise anything
        why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        return Chosen("", why)
    return Chosen(manager.name_of(picked), f"it reaches {', '.join(sorted(picked.capabilities))}")
