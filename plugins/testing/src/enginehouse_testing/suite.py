"""The suites as pytest tests, for the author of a plugin."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('the suites are pytest tests; pip install "enginehouse[testing]"') from error

from enginehouse.engines.model import Device
from enginehouse.plugin import Advantage, Loss, Record, Reward, RolloutBackend, Tracker, TrainBackend, Transport
from enginehouse_testing.given import NAMED_BY_MODULE, ColumnOf, Given, Read
from enginehouse_testing.naming import record_of
from enginehouse_testing.running import Case, Certifier, cases
from enginehouse_testing.unwritten import Unwritten, unwritten

NAMED = ("backend", "transport", *NAMED_BY_MODULE)
"""Class attributes that name the record under test. A suite has one of them."""


class Suite:
    """The base of the suites: one test for each check and layout.

    While methods are yet to be written (`enginehouse_testing.unwritten`), the suite has only a failing test for each of
    these methods, unless `checks` names some checks.

    Class attributes:
        layouts: names of declared layouts to test; None: all.
        checks: names of checks to run; None: all.
        runtime: runtime of a rollout engine, as in a config.
        device: device of an engine; None: a GPU if there is one that the engine can use, else the CPU. Tests of engines
            on GPUs are marked `gpu`.
    """

    layouts: ClassVar[tuple[str, ...] | None] = None
    checks: ClassVar[tuple[str, ...] | None] = None
    runtime: ClassVar[str] = "auto"
    device: ClassVar[Device | None] = None
    kind: ClassVar[str]

    @classmethod
    def record(cls) -> Any:
        """Return the record under test."""
        return record_of(cls.kind, getattr(cls, "backend" if cls.kind in ("train", "rollout") else cls.kind))

    @classmethod
    def given(cls) -> Given:
        """Return the arguments and data for the record, from the class attributes that have the names of fields of
        `Given`."""
        return Given(**{field.name: getattr(cls, field.name) for field in fields(Given) if hasattr(cls, field.name)})

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not any(hasattr(cls, attribute) for attribute in NAMED):
            return
        if cls.checks is None and (missing := unwritten(cls.record())):
            cls.test_is_written = _failing_tests(missing)  # type: ignore[attr-defined]
            return
        parameters = [
            pytest.param(
                case, id=str(case), marks=[pytest.mark.gpu] if "cuda" in (case.check.device, cls.device) else []
            )
            for case in cases(cls.record(), cls.layouts, cls.checks)
        ]

        @pytest.mark.parametrize("case", parameters)
        def test_conforms(self: Suite, case: Case, certifier: Certifier) -> None:
            result = certifier.run(case)
            if result.outcome == "not run":
                pytest.skip(result.detail)
            measured = "" if result.measured is None else f" measured {result.measured:.3g},"
            message = f"{case.check.claim}:{measured} tolerance {result.tolerance:g}. {result.detail}"
            if result.outcome == "warning":
                warnings.warn(message, stacklevel=1)
            else:
                assert result.outcome == "passed", message

        cls.test_conforms = test_conforms  # type: ignore[attr-defined]

    @pytest.fixture(scope="class")
    @classmethod
    def certifier(cls) -> Iterator[Certifier]:
        """Yield the object that runs the cases, whose processes all tests of the class share."""
        with Certifier(cls.record(), cls.runtime, cls.device, given=cls.given()) as certifier:
            yield certifier


def _failing_tests(missing: Sequence[Unwritten]) -> Any:
    """Return a test that fails with one line for each method that is yet to be written."""

    @pytest.mark.parametrize("method", [pytest.param(method, id=method.name) for method in missing])
    def test_is_written(self: Suite, method: Unwritten) -> None:
        pytest.fail(str(method), pytrace=False)

    return test_is_written


class TrainEngineSuite(Suite):
    """Tests everything that a training backend promises.

        from enginehouse_testing import TrainEngineSuite

        class TestMine(TrainEngineSuite):
            backend = "mine"

    A capability that the backend does not declare has no tests. Tests that need GPUs are marked `gpu`, and skipped if
    there are too few GPUs.

    Class attributes:
        backend: a registered name, or a record that need not be registered.
        device: the CPU, which can test every layout; `"cuda"` in a suite for machines with GPUs.
    """

    kind = "train"
    backend: ClassVar[str | TrainBackend]
    device: ClassVar[Device | None] = "cpu"


class RolloutEngineSuite(Suite):
    """Tests everything that a rollout backend promises, with the engine in its runtime and the oracle here.

        from enginehouse_testing import RolloutEngineSuite

        class TestMine(RolloutEngineSuite):
            backend = "mine"

    A capability that the backend does not declare has no tests. The suite launches an engine for each of a few tiny
    models, and runs all checks of that model on it.

    Class attributes:
        backend: a registered name, or a record that need not be registered.
    """

    kind = "rollout"
    backend: ClassVar[str | RolloutBackend]


class WeightTransportSuite(Suite):
    """Tests everything that a weight transport promises, with senders and receivers in this process.

        from enginehouse_testing import WeightTransportSuite

        class TestMine(WeightTransportSuite):
            transport = "mine"

    Class attributes:
        transport: a registered name, or a record that need not be registered.
    """

    kind = "transport"
    transport: ClassVar[str | Transport]


class LossSuite(Suite):
    """Tests everything that a loss promises, on made-up samples, in this process. It takes a second.

        from enginehouse_testing import LossSuite

        class TestMine(LossSuite):
            loss = "mine"

    Class attributes:
        loss: a registered name, `"module:function"`, or a record that need not be registered.
        arguments: arguments of the loss, as in `algorithm.loss.arguments`.
        columns: additional columns that the loss reads, for example the columns that your own advantage adds. They hold
            one random number for each `"row"` or `"token"`.
    """

    kind = "loss"
    loss: ClassVar[str | Loss]
    arguments: ClassVar[Mapping[str, Any]] = {}
    columns: ClassVar[Mapping[str, ColumnOf]] = {}


class AdvantageSuite(Suite):
    """Tests everything that an advantage promises, on made-up samples, in this process. It takes a second.

        from enginehouse_testing import AdvantageSuite

        class TestMine(AdvantageSuite):
            advantage = "mine"

    Class attributes:
        advantage: a registered name, `"module:function"`, or a record that need not be registered.
        arguments: arguments of the advantage, as in `algorithm.advantage.arguments`.
        columns: additional columns that it reads, with one random number for each `"row"` or `"token"`.
    """

    kind = "advantage"
    advantage: ClassVar[str | Advantage]
    arguments: ClassVar[Mapping[str, Any]] = {}
    columns: ClassVar[Mapping[str, ColumnOf]] = {}


class RewardSuite(Suite):
    """Tests everything that a reward promises, in a process of a reward pool, as in a run.

        from enginehouse_testing import RewardSuite

        class TestMine(RewardSuite):
            reward = "mine"
            examples = [{"prompt": "2 + 2", "answer": "4", "response": "4", "reward": 1.0}]

    Class attributes:
        reward: a registered name, `"module:function"`, or a record that need not be registered.
        arguments: arguments of the reward, as in `reward.arguments`.
        examples: rows of data, each with a `response` and, if it is known, the expected `reward`. Without examples,
            the suite scores made-up rows with an `answer`.
        repeatable: True if the same row gets the same score each time; False for a reward that asks a model.
        seconds: maximum time in seconds that the reward may take for a row.
    """

    kind = "reward"
    reward: ClassVar[str | Reward]
    arguments: ClassVar[Mapping[str, Any]] = {}
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()
    repeatable: ClassVar[bool] = True
    seconds: ClassVar[float] = 10.0


class TrackerSuite(Suite):
    """Tests everything that a tracker promises, in this process.

        from enginehouse_testing import TrackerSuite

        class TestMine(TrackerSuite):
            tracker = "mine"

    If the metrics can be read back, write `read`: the suite then checks that none is missing once the tracker has
    finished. Without `read`, it only checks that no call raises an error or hangs.

    Class attributes:
        tracker: a registered name, `"module:Class"`, or a record that need not be registered.
        arguments: arguments of the tracker, as in a config.
        read: a static method `read(directory)`, which reads back the metrics of the run in a directory: by name, pairs
            of a step and a value.
    """

    kind = "tracker"
    tracker: ClassVar[str | Tracker]
    arguments: ClassVar[Mapping[str, Any]] = {}
    read: ClassVar[Read | None] = None


class EnvironmentSuite(Suite):
    """Tests everything that an environment promises. A scripted policy instead of a model plays it in this process.

        from enginehouse_testing import EnvironmentSuite

        class TestMine(EnvironmentSuite):
            environment = "mine"
            examples = [{"prompt": "2 + 2 =", "answer": "4"}]
            replies = ["4", "5"]

    Class attributes:
        environment: a registered name, `"module:Class"`, or a record that need not be registered.
        arguments: arguments of the environment, as in `environment.arguments`.
        examples: rows of data for tasks. Without examples, the suite uses made-up rows with an `answer`.
        replies: texts with which the policy answers, in a random order that is the same in every run of the suite.
            Without replies, the policy uses a few built-in answers.
    """

    kind = "environment"
    environment: ClassVar[str | Record]
    arguments: ClassVar[Mapping[str, Any]] = {}
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()
    replies: ClassVar[Sequence[str]] = ()
