"""The suite as pytest tests, for the author of a training backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from enginehouse.plugin import TrainBackend, plugins
from enginehouse.testing.running import Case, Certifier, cases


class TrainEngineSuite:
    """Everything a training backend promises, one test for each check and layout.

        from enginehouse.testing import TrainEngineSuite

        class TestMine(TrainEngineSuite):
            backend = "mine"

    Class attributes:
        backend: a registered name, or a record that need not be registered.
        layouts: names of declared layouts to test; None: all.
        checks: names of checks to run; None: all.

    Checks of capabilities the backend does not declare are no tests. Those that need GPUs are marked `gpu`, and skipped
    where there are too few.
    """

    backend: ClassVar[str | TrainBackend]
    layouts: ClassVar[tuple[str, ...] | None] = None
    checks: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def record(cls) -> TrainBackend:
        """The backend under test."""
        return plugins().get(TrainBackend, cls.backend) if isinstance(cls.backend, str) else cls.backend

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not hasattr(cls, "backend"):
            return
        cases_of = [
            pytest.param(case, id=str(case), marks=[pytest.mark.gpu] if case.check.device == "cuda" else [])
            for case in cases(cls.record(), cls.layouts, cls.checks)
        ]

        @pytest.mark.parametrize("case", cases_of)
        def test_conforms(self: TrainEngineSuite, case: Case, certifier: Certifier) -> None:
            result = certifier.run(case)
            if result.outcome == "not run":
                pytest.skip(result.detail)
            measured = "" if result.measured is None else f" measured {result.measured:.3g},"
            assert result.outcome == "passed", (
                f"{case.check.claim}:{measured} tolerance {result.tolerance:g}. {result.detail}"
            )

        cls.test_conforms = test_conforms  # type: ignore[attr-defined]

    @pytest.fixture(scope="class")
    def certifier(self) -> Iterator[Certifier]:
        """The processes that all tests of the class share."""
        with Certifier(self.record()) as certifier:
            yield certifier
