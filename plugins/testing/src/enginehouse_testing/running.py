"""Runs checks: makes cases of checks and layouts, and runs them in processes that it keeps between cases."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from enginehouse.engines.options import RolloutOptions
from enginehouse.errors import UserError, nearest
from enginehouse.plugin import (
    Backend,
    Layout,
    Record,
    Reward,
    RolloutBackend,
    TrainBackend,
    Transport,
    capabilities,
    resolve,
)
from enginehouse.runtimes import choose_runtime
from enginehouse_rl.plan.device import pick_device, visible_gpus
from enginehouse_testing.certificate import Certificate, Result, depends_on
from enginehouse_testing.check import PROTOCOL, Check, Seen
from enginehouse_testing.checks import checks_of
from enginehouse_testing.given import Given
from enginehouse_testing.model_under_test import TINY, ModelUnderTest
from enginehouse_testing.naming import check_given
from enginehouse_testing.origin import commit_of, origin_of, protocol_of
from enginehouse_testing.sites import (
    ACT_SECONDS,
    FUNCTION_SECONDS,
    ROLLOUT_ACT_SECONDS,
    TRANSPORT_SECONDS,
    HereSite,
    RewardSite,
    RolloutSite,
    Site,
    TrainSite,
    TransportSite,
    gpus_of,
)

if TYPE_CHECKING:
    from enginehouse.engines.model import Device

MOST_PAIRS = 6
"""Maximum number of pairs of layouts between which checkpoints are moved."""

QUANTIZED_TOLERANCE = 2.5
"""Largest difference in nats that passes between logprobs of transformers in float32 and of a rollout engine that
quantizes. vLLM's `fp8` differed by at most 1.1 to 1.6 in three checks of a tiny model; other random weights by 9 to 10,
and a model whose adapter is ignored by 3.0."""

HERE = Layout("here")
"""The layout of records that run in the suite's own process."""

QUICK: Mapping[str, tuple[str, ...]] = {
    "train": ("logprobs", "gradients", "training", "weights", "checkpoint"),
    "rollout": ("overtaking", "greedy", "logprobs", "ends", "refused", "abort_one", "pause_abort", "update"),
    "transport": ("exact", "several_ranks", "awkward_tensors"),
    "loss": ("value", "cut", "gradient"),
    "advantage": ("column", "order", "needs"),
    "reward": ("score", "odd_responses"),
    "tracker": ("life", "written", "resumed"),
    "environment": ("episodes", "tokens", "loop"),
}
"""The first few checks to run, by kind: most mistakes of a new engine show in one of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A check at a layout, or from the first of two layouts to the second."""

    check: Check
    layouts: tuple[Layout, ...]

    @property
    def layout(self) -> str:
        """Names of the layouts."""
        return " -> ".join(layout.name for layout in self.layouts)

    def result(self, outcome: Any, measured: float | None = None, detail: str = "") -> Result:
        """Return a result of the case."""
        check = self.check
        return Result(check.name, check.capability, self.layout, check.tolerance, measured, outcome, detail)

    def __str__(self) -> str:
        return f"{self.check.name}-{self.layout.replace(' -> ', '-to-')}"


def cases(
    record: Record,
    layouts: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    model: ModelUnderTest = TINY,
) -> list[Case]:
    """Return every case of a record's declared capabilities and layouts, or of the named checks and layouts.

    A user's model is checked at the first layout, unless others are named, and only by checks that compare an engine
    with transformers.

    Raises:
        UserError: a named check or layout does not exist, or the record is not checked with the model.
    """
    _check_model(record, model)
    chosen, places = _choose(record, layouts, checks, model)
    made = []
    for check in chosen:
        if not check.declared(declared_by(record)):
            continue
        fitting = [place for place in places if not _lacks(check, place)]
        # Layouts for this capability come first, because checkpoints are moved between only a few pairs.
        special_first = sorted(fitting, key=lambda place: not place.only)
        between: Iterable[tuple[Layout, ...]] = pairs(special_first) if check.between else [(p,) for p in fitting]
        made += [Case(check, place) for place in between]
    if isinstance(record, RolloutBackend):  # order by layout, because each layout launches an engine
        made.sort(key=lambda case: places.index(case.layouts[0]))
    return made


def undeclared(
    record: Record,
    layouts: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    model: ModelUnderTest = TINY,
) -> list[Result]:
    """Return results for the checks that do not run: checks of a capability that the record or one of its layouts does
    not declare, and checks that run only with the tiny models."""
    chosen, places = _choose(record, layouts, checks, model)
    declared = declared_by(record)
    lacking = [
        Case(check, (place,)).result("not declared", detail=f"layout {place.name} lacks {check.capability!r}")
        for check in chosen
        for place in places
        if check.capability in declared and check.declared(declared) and _lacks(check, place)
    ]
    for check in chosen:
        if not check.declared(declared):
            missing = next(name for name in (check.capability, check.also) if name not in (PROTOCOL, "", *declared))
            result = Case(check, ()).result("not declared", detail=f"{record.name} does not declare {missing!r}")
            lacking.append(result)
    asked = {check.name for check in chosen}
    unchosen = [check for check in _choose(record, layouts, checks)[0] if check.name not in asked]
    reason = "this check runs only with the tiny models in float32"
    return lacking + [Case(check, ()).result("not run", detail=reason) for check in unchosen]


def _check_model(record: Record, model: ModelUnderTest) -> None:
    """Reject a model that the checks of a record do not support.

    Raises:
        UserError: the record is no engine, or does not declare that it computes in the dtype.
    """
    if model == TINY:
        return
    if not isinstance(record, Backend):
        raise UserError(f"--model and --dtype are for engines, but {record.name!r} is a {record.kind}")
    half = capabilities.HALF_PRECISION
    if model.dtype == "bfloat16" and isinstance(record, TrainBackend) and half not in record.capabilities:
        raise UserError(f"--dtype bfloat16: train {record.name!r} does not declare {half!r}")


def declared_by(record: Record) -> Collection[str]:
    """Return the capabilities that a record declares, if its kind has any."""
    declared: Collection[str] = getattr(record, "capabilities", ())
    return declared


def layouts_of(record: Record) -> tuple[Layout, ...]:
    """Return the layouts at which a record is checked.

    A backend has its declared layouts. A transport is checked with one receiver and with three, but its reach only with
    one. All other records have a single layout.
    """
    if isinstance(record, Transport):
        reaches = (capabilities.SAME_HOST, capabilities.CROSS_HOST)
        return (Layout("one receiver", 1), Layout("three receivers", 3, without=reaches))
    return record.layouts if isinstance(record, Backend) else (HERE,)


def pairs(layouts: Sequence[Layout]) -> list[tuple[Layout, Layout]]:
    """Return pairs of layouts with different numbers of processes, at most `MOST_PAIRS`.

    First comes one pair for each combination of two numbers of processes, ordered from the largest drop to the largest
    rise. Then come further pairs, beginning with the layouts that have the most options.
    """
    every = [(a, b) for a in layouts for b in layouts if a.processes != b.processes]
    every.sort(key=lambda pair: pair[1].processes - pair[0].processes)
    first = {(a.processes, b.processes): (a, b) for a, b in reversed(every)}
    remaining = [pair for pair in every if pair not in first.values()]
    remaining.sort(key=lambda pair: -(len(pair[0].options) + len(pair[1].options)))
    return [*(pair for pair in every if pair in first.values()), *remaining][:MOST_PAIRS]


class Certifier:
    """Runs cases of one record in processes that it keeps. A context manager.

    If a check raises an error or does not end, its result is a failure, and its processes are started again.

    Args:
        record: a record of any kind that has a suite; it need not be registered. Between cases this attribute may be
            set to another record of the same kind, and the processes stay.
        runtime: the runtime of a rollout engine, as in a config: `"auto"`, a name or a path.
        device: device of an engine, as in `device_of`.
        timeout: maximum time in seconds of an act of a check; None: as long as a busy machine may need.
        given: arguments and data to try a function with.
    """

    def __init__(
        self,
        record: Any,
        runtime: str = "auto",
        device: Device | None = None,
        timeout: float | None = None,
        given: Given = Given(),  # noqa: B008 - frozen
    ):
        self.record = record
        self._given = given
        self._device = device_of(record, device)
        self._site = _site(record, runtime, self._device, timeout, given)
        self._seen: dict[tuple[Any, ...], list[Seen]] = {}
        self._versions: dict[str, str] = {}

    def __enter__(self) -> Certifier:
        check_given(self.record, self._given)
        self._site.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._site.close()

    def run(self, case: Case) -> Result:
        """Run one case."""
        if missing := _missing_gpus(self.record, case, self._device):
            return case.result("not run", detail=missing)
        if case.check.reads and self._given.read is None:
            return case.result("not run", detail="it needs a way to read metrics back: `read` of TrackerSuite")
        directory = tempfile.mkdtemp(prefix="enginehouse-certify-")
        try:
            seen = []
            for number in range(len(case.check.acts)):
                layout = case.layouts[min(number, len(case.layouts) - 1)]
                seen.append(self._once(case.check, number, layout, directory))
            measured = case.check.judge(*seen)
        except Exception as error:
            return self._failed(case, None, f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if not measured.error <= case.check.tolerance:  # fails for nan too
            return self._failed(case, measured.error, measured.detail)
        return case.result("passed", measured.error, measured.detail)

    def _failed(self, case: Case, measured: float | None, detail: str) -> Result:
        """Return the result of a failed case: a warning if the check is newer than the plugin's contract version."""
        self._site.discard(case.layouts[0])
        written_for, since = protocol_of(self.record), case.check.since
        if not written_for or _version(written_for) >= _version(since):
            return case.result("failed", measured, detail)
        newer = f"this check came with contract {since}, but the plugin is written for {written_for}"
        return case.result("warning", measured, f"{newer}: {detail}" if detail else newer)

    def versions(self) -> dict[str, str]:
        """Return the versions of a rollout engine's dependencies in its runtime; empty before a check has run there."""
        self._versions = self._versions or self._site.versions(depends_on(self.record))
        return self._versions

    def _once(self, check: Check, number: int, layout: Layout, directory: str) -> list[Seen]:
        """Return the results of an act. If several checks of a training engine share their only act, it runs once."""
        if len(check.acts) > 1 or not isinstance(self.record, TrainBackend):
            return self._site.act(self.record, check, number, layout, directory)
        key = (self.record.engine, check.acts[number], check.device, layout.name)
        if key not in self._seen:
            self._seen[key] = self._site.act(self.record, check, number, layout, directory)
        return self._seen[key]


def _version(contract: str) -> tuple[int, ...]:
    return tuple(map(int, contract.split(".")))


def device_of(record: Any, requested: Device | None = None) -> Device:
    """Return the device on which the checks of a record run.

    Args:
        record: a record of any kind; only engines may run on a GPU.
        requested: the device for an engine; None: a GPU if this environment and the engine can use it, else the CPU.

    Raises:
        UserError: the engine does not run on the device.
    """
    if not isinstance(record, Backend):
        return "cpu"
    if requested is None:
        available = pick_device("auto")[0]
        return available if available in record.devices else "cpu" if "cpu" in record.devices else "cuda"
    if requested not in record.devices:
        raise UserError(f"{record.kind} {record.name!r} runs on {' and '.join(record.devices)}, not on {requested}")
    return requested


def _site(record: Any, runtime: str, device: Device, timeout: float | None, given: Given) -> Site:
    if isinstance(record, TrainBackend):
        return TrainSite(timeout or ACT_SECONDS, device)
    if isinstance(record, Transport):
        return TransportSite(timeout or TRANSPORT_SECONDS)
    if not isinstance(record, RolloutBackend):
        return (RewardSite if isinstance(record, Reward) else HereSite)(given, timeout or FUNCTION_SECONDS)
    interpreter = choose_runtime(record, runtime, device)
    return RolloutSite(interpreter.python, interpreter.env, device, timeout or ROLLOUT_ACT_SECONDS)


def certify(
    record: Record,
    *,
    layouts: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    runtime: str = "auto",
    device: Device | None = None,
    timeout: float | None = None,
    fail_fast: bool = False,
    given: Given = Given(),  # noqa: B008 - frozen
    model: ModelUnderTest = TINY,
    options: Mapping[str, Any] = MappingProxyType({}),
    begins: Callable[[Case, int, int], None] = lambda case, number, of: None,
    ended: Callable[[Certificate], None] = lambda certificate: None,
) -> Certificate:
    """Run the suite for a record, which need not be registered.

    Args:
        record: the record.
        layouts: names of declared layouts; None: all.
        checks: names of checks; None: all.
        runtime, device, timeout, given: see `Certifier`.
        model: the model that engines are checked with.
        options: options of an engine, which replace those of its layouts. If they make a rollout engine quantize,
            larger differences from transformers are accepted. The certificate is then not of the whole suite.
        fail_fast: stop after the first check that fails; the certificate is then not of the whole suite.
        begins: function that is called before each case, with its number, counted from 1, and the number of cases.
        ended: function that is called with the certificate so far after each case, and once it is finished.

    Raises:
        UserError: a named check or layout does not exist, or the engine does not run on the device or with the model,
            or does not take the options.
        ControllerError: Ray cannot be started.
    """
    planned = cases(record, layouts, checks, model)
    check_given(record, given)
    if options:
        planned = [_add_options(record, case, options, device_of(record, device), model) for case in planned]
    is_whole = layouts is None and checks is None and not options
    certificate = Certificate(
        record.name,
        whole=is_whole,
        kind=record.kind,
        device=device_of(record, device) if isinstance(record, Backend) else "",
        depends=depends_on(record),
        origin=origin_of(record),
        commit=commit_of(record),
        model=model,
        options=options,
    )
    ended(certificate)
    longest = timeout or (ROLLOUT_ACT_SECONDS if model.path else None)
    with Certifier(record, runtime, device, longest, given) as certifier:
        for number, case in enumerate(planned, start=1):
            begins(case, number, len(planned))
            certificate.checks.append(certifier.run(case))
            certificate.runtime = certifier.versions()
            if fail_fast and certificate.failed:
                certificate.whole = is_whole and number == len(planned)
                break
            ended(certificate)
    certificate.checks += undeclared(record, layouts, checks, model)
    certificate.finished = True
    ended(certificate)
    return certificate


def _add_options(record: Record, case: Case, options: Mapping[str, Any], device: Device, model: ModelUnderTest) -> Case:
    """Return a case with these engine options, and with the tolerance of an engine that quantizes if they make it do
    so. Raises `UserError` if the engine does not take them."""
    if not isinstance(record, Backend):
        raise UserError(f"--options are for engines, but {record.name!r} is a {record.kind}")
    layouts = tuple(replace(layout, options={**layout.options, **options}) for layout in case.layouts)
    check, schema = case.check, resolve(record.options)
    for layout in layouts:
        try:
            typed = schema(**layout.options)
            typed.check_device(device, model.dtype)
        except ValidationError as error:
            wrong = error.errors()[0]
            name = ".".join(map(str, wrong["loc"]))
            raise UserError(f"--options: {name}: {wrong['msg']}. {nearest(name, schema.model_fields)}") from error
        except UserError as error:
            raise UserError(f"--options: {error}") from error
        if isinstance(typed, RolloutOptions) and typed.quantizes() and check.tolerances:
            check = replace(check, tolerance=QUANTIZED_TOLERANCE)
    return Case(check, layouts)


def _lacks(check: Check, layout: Layout) -> bool:
    """Return True if a layout lacks a capability that a check needs, or is only for checks of other capabilities."""
    lacking = {check.capability, check.also} & set(layout.without)
    return bool(lacking) or bool(layout.only and check.capability not in layout.only)


def _missing_gpus(record: Any, case: Case, device: Device) -> str:
    """Describe the GPUs that a case lacks; empty if it can run."""
    if "cuda" not in (case.check.device, device):
        return ""
    if isinstance(record, RolloutBackend):  # it may run in its own environment, whatever torch is here
        needed, available = max(gpus_of(record, layout) for layout in case.layouts), visible_gpus()
    else:
        import torch

        needed, available = max(layout.processes for layout in case.layouts), torch.cuda.device_count()
    return "" if available >= needed else f"needs {needed} GPU(s), but this machine has {available}"


def _choose(
    record: Record, layouts: Sequence[str] | None, checks: Sequence[str] | None, model: ModelUnderTest = TINY
) -> tuple[list[Check], list[Layout]]:
    """Return the chosen checks that fit the model, and the chosen layouts."""
    chosen = _select("check", checks, checks_of(record.kind), "suite")
    places = _select("layout", layouts, layouts_of(record), f"{record.kind} {record.name!r}")
    if model == TINY:
        return chosen, places
    return [check.of_model(model) for check in chosen if check.tolerances], places if layouts else places[:1]


def _select(what: str, names: Sequence[str] | None, choices: Sequence[Any], owner: str) -> list[Any]:
    if names is None:
        return list(choices)
    by_name = {choice.name: choice for choice in choices}
    for name in names:
        if name not in by_name:
            raise UserError(f"the {owner} has no {what} {name!r}. {nearest(name, by_name)}")
    return [choice for choice in choices if choice.name in names]
