"""Makes the matrix: certificates first, then runs; each finding is written before the next begins."""

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
from enginehouse_testing.matrix.findings import Findings
from enginehouse_testing.matrix.row import Row, refused
from enginehouse_testing.matrix.running import run, shortened
from enginehouse_testing.matrix.standing import standing
from enginehouse_testing.matrix.task import make_task
from enginehouse_testing.running import Case


class Onlooker(Protocol):
    """Is told how it goes."""

    def begins(self, what: str) -> None:
        """A certificate or a combination is begun."""
        ...

    def part(self, number: int, of: int, what: str) -> None:
        """A part of what is under way begins, counted from 1."""
        ...

    def ended(self, said: str, failed: bool) -> None:
        """What was begun has ended, with these words."""
        ...


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes what is missing of some combinations.

    Attributes:
        plugins: what is installed.
        setting: how long and how wide runs are.
        directory: where runs and their logs go.
        certificates: where certificates are, or go.
        findings: what was found earlier; takes in what is found.
        page: where it is written.
        onlooker: is told how it goes.
    """

    plugins: PluginManager
    setting: Setting
    directory: Path
    certificates: Path
    findings: Findings
    page: Path
    onlooker: Onlooker

    def certify(self, chosen: Sequence[Combination], *, make: bool, again: bool = False) -> bool:
        """Read the certificates of all that is combined; where there is none (or `again`), make it, if `make` says so.

        Returns:
            Whether no certificate has a failed check, and none that was there before is missing now.
        """
        device, _ = pick_device("auto")
        clean = True
        for kind, name in parts_of(chosen):
            self.onlooker.begins(f"certificate of {kind} {name}")
            provided = self.plugins.providers(kind, name)[0]
            one = certified(provided, self.certificates, device, make=make, again=again, begins=self._part)
            former = self.findings.certificates.get((kind, name))
            said = one.get("problem") or ", ".join(f"{count} {word}" for word, count in one["counts"].items())
            lost = "problem" in one and former is not None and "problem" not in former
            clean = self._found(one, said, lost=lost, failed=bool(one.get("failed"))) and clean
        return clean

    def run(self, chosen: Sequence[Combination], *, again: bool) -> bool:
        """Run every combination that the plan allows and that does not stand yet.

        Args:
            chosen: what to run.
            again: run what stands as well.

        Returns:
            Whether no run failed, and none that was made before is impossible now.
        """
        config = make_task(self.directory / "task")
        clean = True
        for combination in chosen:
            self.onlooker.begins(str(combination))
            row = self._row(combination, config, again)
            former = self.findings.rows.get(combination)
            lost = row.outcome == "refused" and former is not None and former.outcome == "ran"
            clean = self._found(row, in_words(row), lost=lost, failed=row.outcome == "failed") and clean
        return clean

    def _found(self, finding: Row | dict[str, Any], said: str, *, lost: bool, failed: bool) -> bool:
        """Take in a finding, unless it is `lost`: nothing where there was something. Returns whether all is well."""
        if lost:
            said = f"{said}; what was found before is kept"
        else:
            self.findings.add(finding)
            self._write()
        self.onlooker.ended(said, lost or failed)
        return not (lost or failed)

    def _row(self, combination: Combination, config: Path, again: bool) -> Row:
        directory = self.directory / combination.folder
        try:
            allowed = planned(self.plugins, combination, self.setting, config, directory)
            stands = self._standing(combination, allowed.plan.device)
        except UserError as error:
            return refused(combination, self.setting, shortened(str(error)))
        former = self.findings.rows.get(combination)
        if former is not None and not again and former.still_stands(self.setting, stands):
            return former
        log = self.directory / f"{combination.folder}.log"
        return run(combination, self.setting, allowed, config, log, stands)

    def _standing(self, combination: Combination, device: str) -> dict[str, dict[str, str]]:
        """Versions by kind.

        Raises:
            RuntimeProblem: there is no environment for one of them.
        """
        return {kind: standing(self.plugins.providers(kind, getattr(combination, kind))[0], device) for kind in KINDS}

    def _part(self, case: Case, number: int, of: int) -> None:
        self.onlooker.part(number, of, f"{case.check.name} {case.layout}")

    def _write(self) -> None:
        self.findings.sort(combinations(self.plugins, {}))
        self.findings.write(self.page)


def parts_of(chosen: Sequence[Combination]) -> list[tuple[str, str]]:
    """What is combined, as `(kind, name)`, each once."""
    return list(dict.fromkeys((kind, getattr(one, kind)) for kind in KINDS for one in chosen))


def in_words(row: Row) -> str:
    """A row on one line."""
    found = row.figures
    if row.outcome != "ran" or found is None:
        return f"{row.outcome}: {row.reason}"
    return (
        f"{found.mean_difference:.1e} nats apart, update {found.update_seconds:.3g} s, "
        f"{found.tokens_per_second:,.0f} tokens/s"
    )
