"""The suite as pytest tests, for the author of a backend or a transport."""

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
from enginehouse.plugin import (
    Advantage,
    Loss,
    Record,
    Reward,
    RolloutBackend,
    Tracker,
    TrainBackend,
    Transport,
    plugins,
)
from enginehouse_testing.given import NAMED_BY_MODULE, ColumnOf, Given, Read
from enginehouse_testing.naming import record_of
from enginehouse_testing.running import Case, Certifier, cases
from enginehouse_testing.unwritten import Unwritten, unwritten

NAMED = ("backend", "transport", *NAMED_BY_MODULE)
"""The class attributes of which a suite has one: what it is of."""


class Suite:
    """What the suites have in common: one test for each check and layout.

    As long as methods are yet to be written (`enginehouse_testing.unwritten`) there is one test for each of these,
    which fails, and no other, unless `checks` names some.

    Class attributes:
        layouts: names of declared layouts to test; None: all.
        checks: names of checks to run; None: all.
        runtime: the runtime of a rollout engine, as in a config.
        device: what an engine runs on; None: a GPU where there is one that it can use, else the CPU. Tests of engines
            that are to run on GPUs are marked `gpu`.
    """

    layouts: ClassVar[tuple[str, ...] | None] = None
    checks: ClassVar[tuple[str, ...] | None] = None
    runtime: ClassVar[str] = "auto"
    device: ClassVar[Device | None] = None

    @classmethod
    def record(cls) -> Any:
        """What is tested; None: nothing yet."""
        raise NotImplementedError

    @classmethod
    def given(cls) -> Given:
        """What it is tried with."""
        return Given()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not any(hasattr(cls, named) for named in NAMED):
            return
        if cls.checks is None and (missing := unwritten(cls.record())):
            cls.test_is_written = _one_for_each(missing)  # type: ignore[attr-defined]
            return
        cases_of = [
            pytest.param(
                case, id=str(case), marks=[pytest.mark.gpu] if "cuda" in (case.check.device, cls.device) else []
            )
            for case in cases(cls.record(), cls.layouts, cls.checks)
        ]

        @pytest.mark.parametrize("case", cases_of)
        def test_conforms(self: Suite, case: Case, certifier: Certifier) -> None:
            result = certifier.run(case)
            if result.outcome == "not run":
                pytest.skip(result.detail)
            measured = "" if result.measured is None else f" measured {result.measured:.3g},"
            said = f"{case.check.claim}:{measured} tolerance {result.tolerance:g}. {result.detail}"
            if result.outcome == "warning":
                warnings.warn(said, stacklevel=1)
            else:
                assert result.outcome == "passed", said

        cls.test_conforms = test_conforms  # type: ignore[attr-defined]

    @pytest.fixture(scope="class")
    @classmethod
    def certifier(cls) -> Iterator[Certifier]:
        """The processes that all tests of the class share."""
        with Certifier(cls.record(), cls.runtime, cls.device, given=cls.given()) as certifier:
            yield certifier


def _one_for_each(missing: Sequence[Unwritten]) -> Any:
    """A test that fails for each method that is yet to be written, with one line."""

    @pytest.mark.parametrize("method", [pytest.param(one, id=one.name) for one in missing])
    def test_is_written(self: Suite, method: Unwritten) -> None:
        pytest.fail(str(method), pytrace=False)

    return test_is_written


class TrainEngineSuite(Suite):
    """Everything a training backend promises.

        from enginehouse_testing import TrainEngineSuite

        class TestMine(TrainEngineSuite):
            backend = "mine"

    Checks of capabilities the backend does not declare are no tests. Those that need GPUs are marked `gpu`, and skipped
    where there are too few.

    Class attributes:
        backend: a registered name, or a record that need not be registered.
        device: the CPU, where every layout can be tested; `"cuda"` in a suite for machines with GPUs.
    """

    backend: ClassVar[str | TrainBackend]
    device: ClassVar[Device | None] = "cpu"

    @classmethod
    def record(cls) -> TrainBackend:
        """The backend under test."""
        return plugins().get(TrainBackend, cls.backend) if isinstance(cls.backend, str) else cls.backend


class RolloutEngineSuite(Suite):
    """Everything a rollout backend promises, with the engine in its runtime and the oracle here.

        from enginehouse_testing import RolloutEngineSuite

        class TestMine(RolloutEngineSuite):
            backend = "mine"

    Checks of capabilities the backend does not declare are no tests. An engine is launched for each of a few tiny
    models and serves all checks of it.

    Class attributes:
        backend: a registered name, or a record that need not be registered.
    """

    backend: ClassVar[str | RolloutBackend]

    @classmethod
    def record(cls) -> RolloutBackend:
        """The backend under test."""
        return (
            plugins().get(RolloutBackend, cls.backend, elsewhere=True) if isinstance(cls.backend, str) else cls.backend
        )


class WeightTransportSuite(Suite):
    """Everything a weight transport promises, with both ends in this process.

        from enginehouse_testing import WeightTransportSuite

        class TestMine(WeightTransportSuite):
            transport = "mine"

    Class attributes:
        transport: a registered name, or a record that need not be registered.
    """

    transport: ClassVar[str | Transport]

    @classmethod
    def record(cls) -> Transport:
        """The transport under test."""
        return plugins().get(Transport, cls.transport) if isinstance(cls.transport, str) else cls.transport


class _OwnSuite(Suite):
    """What suites have in common of what a config may name by its module."""

    arguments: ClassVar[Mapping[str, Any]] = {}
    kind: ClassVar[str]

    @classmethod
    def record(cls) -> Any:
        """What is tested: the class attribute that is called as its kind."""
        return record_of(cls.kind, getattr(cls, cls.kind))

    @classmethod
    def given(cls) -> Given:
        """What it is tried with: the class attributes that are called so."""
        return Given(**{one.name: getattr(cls, one.name) for one in fields(Given) if hasattr(cls, one.name)})


class LossSuite(_OwnSuite):
    """Everything a loss promises, on made-up samples, in this process; it takes a second.

        from enginehouse_testing import LossSuite

        class TestMine(LossSuite):
            loss = "mine"

    Class attributes:
        loss: a registered name, `"module:function"`, or a record that need not be registered.
        arguments: of the loss, as `algorithm.loss.arguments`.
        columns: further columns that it reads, those of an advantage of yours say, each of one random number a
            `"row"` or a `"token"`.
    """

    kind = "loss"
    loss: ClassVar[str | Loss]
    columns: ClassVar[Mapping[str, ColumnOf]] = {}


class AdvantageSuite(_OwnSuite):
    """Everything an advantage promises, on made-up samples, in this process; it takes a second.

        from enginehouse_testing import AdvantageSuite

        class TestMine(AdvantageSuite):
            advantage = "mine"

    Class attributes:
        advantage: a registered name, `"module:function"`, or a record that need not be registered.
        arguments: of the advantage, as `algorithm.advantage.arguments`.
        columns: further columns that it reads, each of one random number a `"row"` or a `"token"`.
    """

    kind = "advantage"
    advantage: ClassVar[str | Advantage]
    columns: ClassVar[Mapping[str, ColumnOf]] = {}


class RewardSuite(_OwnSuite):
    """Everything a reward promises, in a process of a reward pool, as in a run.

        from enginehouse_testing import RewardSuite

        class TestMine(RewardSuite):
            reward = "mine"
            examples = [{"prompt": "2 + 2", "answer": "4", "response": "4", "reward": 1.0}]

    Class attributes:
        reward: a registered name, `"module:function"`, or a record that need not be registered.
        arguments: of the reward, as `reward.arguments`.
        examples: rows of data, each with a `response` and, where it is known, the `reward` that this is to get. Without
            them made-up rows are scored, which have an `answer`.
        repeatable: whether the same row gets the same each time; False for a reward that asks a model, say.
        seconds: longest it may take for a row.
    """

    kind = "reward"
    reward: ClassVar[str | Reward]
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()
    repeatable: ClassVar[bool] = True
    seconds: ClassVar[float] = 10.0


class TrackerSuite(_OwnSuite):
    """Everything a tracker promises, in this process.

        from enginehouse_testing import TrackerSuite

        class TestMine(TrackerSuite):
            tracker = "mine"

    Where what it wrote can be read back, `read` says how, and nothing may be missing once it has finished. Without it
    the suite sees no more than that nothing raises, and that nothing hangs.

    Class attributes:
        tracker: a registered name, `"module:Class"`, or a record that need not be registered.
        arguments: of the tracker, as a config would give them.
        read: `read(directory)`, a static method, reads back what was written for the run of a directory: by name, a
            step and a value each.
    """

    kind = "tracker"
    tracker: ClassVar[str | Tracker]
    read: ClassVar[Read | None] = None


class EnvironmentSuite(_OwnSuite):
    """Everything an environment promises, played in this process by a scripted policy, which is no model.

        from enginehouse_testing import EnvironmentSuite

        class TestMine(EnvironmentSuite):
            environment = "mine"
            examples = [{"prompt": "2 + 2 =", "answer": "4"}]
            replies = ["4", "5"]

    Class attributes:
        environment: a registered name, `"module:Class"`, or a record that need not be registered.
        arguments: of the environment, as `environment.arguments`.
        examples: rows of data, made tasks of; without them made-up ones, which have an `answer`.
        replies: what the policy says, as text, by chance but always the same; without them a few answers.
    """

    kind = "environment"
    environment: ClassVar[str | Record]
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()
    replies: ClassVar[Sequence[str]] = ()
