"""Makes the matrix: certificates first, then runs. Each finding is written before the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from enginehouse.errors import UserError
from enginehouse.plugin import PluginManager
from enginehouse_rl.plan.device import pick_device
from enginehouse_testing.matrix.certified import certified
from enginehouse_testing.matrix.combination import KINDS, Combination, Setting, combinations, planned
from enginehouse_testing.matrix.findings import MatrixFindings
from enginehouse_testing.matrix.row import MatrixRow, refused
from enginehouse_testing.matrix.single_run import run, shortened
from enginehouse_testing.matrix.standing import standing
from enginehouse_testing.matrix.task import make_task
from enginehouse_testing.model_under_test import TINY, ModelUnderTest, folder_of
from enginehouse_testing.running import Case


class Onlooker(Protocol):
    """Follows the progress of the matrix."""

    def begins(self, what: str) -> None:
        """Report that a certificate or a combination begins."""
        ...

    def part(self, number: int, of: int, what: str) -> None:
        """Report that part `number`, counted from 1, of the current certificate or combination begins."""
        ...

    def ended(self, message: str, failed: bool) -> None:
        """Report that the current certificate or combination has ended, with a message."""
        ...


@dataclass(frozen=True, slots=True)
class MatrixMaker:
    """Makes the findings that are missing for some combinations.

    Attributes:
        plugins: all installed plugins.
        directory: directory of runs and their logs.
        certificates: directory of certificates.
        findings: earlier findings, to which new ones are added.
        page: path of the page.
        model: the model of runs and certificates.
    """

    plugins: PluginManager
    setting: Setting
    directory: Path
    certificates: Path
    findings: MatrixFindings
    page: Path
    onlooker: Onlooker
    model: ModelUnderTest = TINY

    def certify(self, chosen: Sequence[Combination], *, make: bool, again: bool = False) -> bool:
        """Read the certificates of all parts. With `make`, make missing certificates. With `again`, make all
        certificates anew.

        Returns:
            True if no certificate has a failed check, and no earlier certificate is missing now.
        """
        device, _ = pick_device("auto")
        clean = True
        for kind, name in parts_of(chosen, self.model):
            self.onlooker.begins(f"certificate of {kind} {name}")
            provided = self.plugins.providers(kind, name)[0]
            summary = certified(
                provided,
                self.certificates,
                device,
                make=make,
                again=again,
                model=self.model,
                begins=self._begin_case,
            )
            former = self.findings.certificates.get((kind, name, self.model.label))
            message = summary.get("problem") or ", ".join(
                f"{count} {word}" for word, count in summary["counts"].items()
            )
            lost = "problem" in summary and former is not None and "problem" not in former
            clean = self._add(summary, message, lost=lost, failed=bool(summary.get("failed"))) and clean
        return clean

    def run(self, chosen: Sequence[Combination], *, again: bool) -> bool:
        """Run every combination that the plan allows and that has no row of this setting and these versions.

        Args:
            chosen: combinations to run.
            again: True to run combinations that have such a row, too.

        Returns:
            True if no run failed, and the plan still allows every combination that ran before.
        """
        config = make_task(self.directory / "task" / folder_of(self.model.label), self.model)
        clean = True
        for combination in chosen:
            self.onlooker.begins(str(combination))
            row = self._row(combination, config, again)
            former = self.findings.rows.get(combination)
            lost = row.outcome == "refused" and former is not None and former.outcome == "ran"
            clean = self._add(row, describe(row), lost=lost, failed=row.outcome == "failed") and clean
        return clean

    def _add(self, finding: MatrixRow | dict[str, Any], message: str, *, lost: bool, failed: bool) -> bool:
        """Add a finding, and return True if it is neither lost nor failed. A finding is lost if it has no result, but
        the earlier finding has one. The earlier finding is then kept."""
        if lost:
            message = f"{message}; the earlier result is kept"
        else:
            self.findings.add(finding)
            self._write()
        self.onlooker.ended(message, lost or failed)
        return not (lost or failed)

    def _row(self, combination: Combination, config: Path, again: bool) -> MatrixRow:
        directory = self.directory / combination.folder
        try:
            allowed = planned(self.plugins, combination, self.setting, config, directory)
            providers = {kind: self.plugins.providers(kind, getattr(combination, kind))[0] for kind in KINDS}
            versions = {kind: standing(provider, allowed.plan.device) for kind, provider in providers.items()}
        except UserError as error:
            return refused(combination, self.setting, shortened(str(error)))
        former = self.findings.rows.get(combination)
        if former is not None and not again and former.still_stands(self.setting, versions):
            return former
        log = self.directory / f"{combination.folder}.log"
        return run(combination, self.setting, allowed, config, log, versions)

    def _begin_case(self, case: Case, number: int, of: int) -> None:
        self.onlooker.part(number, of, f"{case.check.name} {case.layout}")

    def _write(self) -> None:
        self.findings.sort(combinations(self.plugins, {}))
        self.findings.write(self.page)


def parts_of(chosen: Sequence[Combination], model: ModelUnderTest = TINY) -> list[tuple[str, str]]:
    """Return the parts of some combinations that are certified with a model, as `(kind, name)`, each once."""
    kinds = KINDS if model == TINY else ("train", "rollout")
    return list(dict.fromkeys((kind, getattr(row, kind)) for kind in kinds for row in chosen))


def describe(row: MatrixRow) -> str:
    """Describe a row on one line."""
    figures = row.figures
    if row.outcome != "ran" or figures is None:
        return f"{row.outcome}: {row.reason}"
    return (
        f"{figures.mean_difference:.1e} nats apart, update {figures.update_seconds:.3g} s, "
        f"{figures.tokens_per_second:,.0f} tokens/s"
    )
