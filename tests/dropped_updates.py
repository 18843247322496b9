"""What the suite says, by logprobs, of an engine that drops weight updates."""

import dataclasses
import os

from enginehouse.plugin import RolloutBackend, plugins
from enginehouse_testing.running import Certifier, cases


def assert_found(backend: str, mutant: str) -> None:
    """The suite finds that `staged_mutants:BACKEND_MUTANT` drops an update of a learning rate of one millionth."""
    whole = plugins().get(RolloutBackend, backend, elsewhere=True)
    record = dataclasses.replace(whole, engine=f"staged_mutants:{backend}_{mutant}")
    (case,) = cases(record, ("single",), ("small_updates",))
    with Certifier(record, os.environ.get(f"ENGINEHOUSE_TEST_{backend.upper()}_RUNTIME", "auto")) as certifier:
        result = certifier.run(case)
    assert (result.outcome, result.measured) == ("failed", 1.0), result.detail
