"""What the suite says of an engine that drops weight updates."""

import dataclasses
import os

from enginehouse.plugin import RolloutBackend, plugins
from enginehouse_testing.certificate import Result
from enginehouse_testing.running import Certifier, cases


def assert_found(backend: str, mutant: str) -> None:
    """The suite finds, by logprobs, that `staged_mutants:BACKEND_MUTANT` drops an update of a learning rate of one
    millionth."""
    result = judge(backend, mutant, "small_updates")
    assert (result.outcome, result.measured) == ("failed", 1.0), result.detail


def judge(backend: str, mutant: str, check: str) -> Result:
    """Return the result of a check of `staged_mutants:BACKEND_MUTANT`."""
    whole = plugins().get(RolloutBackend, backend, elsewhere=True)
    record = dataclasses.replace(whole, engine=f"staged_mutants:{backend}_{mutant}")
    (case,) = cases(record, ("single",), (check,))
    with Certifier(record, os.environ.get(f"ENGINEHOUSE_TEST_{backend.upper()}_RUNTIME", "auto")) as certifier:
        return certifier.run(case)
