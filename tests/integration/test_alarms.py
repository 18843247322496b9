"""Each alarm has a run that sets it off, and the same run without the cause has none.

When an alarm comes, and that noise is none, is checked in tests/rl/loop/test_alarms.py; `engines_apart` has its runs in
test_mismatch.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from .conftest import QUICKSTART, Start, installed
from .run_process import RunProcess

pytestmark = pytest.mark.slow

ENGINES = """
import asyncio, dataclasses
from enginehouse.plugin import RolloutBackend, hookimpl
from enginehouse.plugin.capabilities import COLOCATES, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS
from enginehouse_torch.rollout import TorchRolloutEngine

enginehouse_protocol = "1.0"

class Drifting(TorchRolloutEngine):
    async def generate(self, request):
        result = await super().generate(request)
        drifted = [
            dataclasses.replace(one, logprobs=[value - 1e-4 * 1.25**one.last_version for value in one.logprobs])
            for one in result.completions
        ]
        return dataclasses.replace(result, completions=drifted)

class Sluggish(TorchRolloutEngine):
    async def launch(self, model, options, context):
        self.nap = 0.2 * context.labels["replica"]
        return await super().launch(model, options, context)

    async def generate(self, request):
        await asyncio.sleep(self.nap)
        return await super().generate(request)

@hookimpl
def enginehouse_register_backends(register):
    for name, engine in (
        ("drifting", "alarming:Drifting"), ("sluggish", "alarming:Sluggish"), ("old", "weights.faults:StaleEngine"),
    ):
        register(RolloutBackend(
            name=name, summary="Goes wrong", engine=engine, options="enginehouse_torch.options:TorchRolloutOptions",
            capabilities={COLOCATES, STOP_STRINGS, SEED, PROMPT_LOGPROBS, WEIGHT_CHECKSUMS},
        ))
"""

SOUND = (
    "reward.function=rewards:unrepeated", "cluster.launcher=inline", "train.steps=24", "train.samples_every=0",
    "actor.engine.options={lr: 1.0e-5}", "algorithm.kl.coefficient=0.001", "weights.effect_check_every=0",
    "rollout.sampling={max_tokens: 7, temperature: 1.0}",
)  # fmt: skip
"""A run that nothing is wrong with: it learns next to nothing, and what it draws is varied."""
LIKELIEST_TOKEN = "rollout.sampling={max_tokens: 1, temperature: 1.0, top_k: 1}"  # seldom the end
NO_KL = "algorithm.kl.coefficient=0"
FEW = "train.steps=12"  # what has to last does so after 10
OVER_RAY = ("cluster.launcher=ray", "rollout.replicas=2", "rollout.placement=separate", FEW)


@pytest.fixture(scope="module")
def engines(house: Path) -> Mapping[str, str]:
    """Installs engines that go wrong; returns the environment in which they are found."""
    core = Path(__file__).parents[1] / "core"
    return {"PYTHONPATH": f"{installed(house, 'alarming', ENGINES)}:{core}"}


@pytest.fixture(scope="module")
def sure(house: Path) -> Path:
    """The quickstart's random model, made sure of what it says: tokens are near certain, or near impossible."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(house / QUICKSTART / "work" / "model")
    model.model.norm.weight.data *= 8
    model.save_pretrained(house / "sure")
    AutoTokenizer.from_pretrained(house / QUICKSTART / "work" / "model").save_pretrained(house / "sure")
    return house / "sure"


def alarms(run: RunProcess) -> dict[str, dict]:
    path = run.directory / "alarms.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert len({row["alarm"] for row in rows}) == len(rows), "each is told once"
    return {row["alarm"]: row for row in rows}


def test_a_run_that_nothing_is_wrong_with_has_no_alarm(train: Start):
    run = train(*SOUND)
    ended = run.finish()
    assert (ended.code, ended.err) == (0, "")
    assert len(run.metrics) == 24
    assert alarms(run) == {}
    assert "alarm" not in ended.out


@pytest.mark.parametrize(
    ("told", "causes"),
    [
        ({"entropy_collapse"}, ("reward.function=rewards:varied", "actor.engine.options={lr: 0.3}")),
        (
            {"responses_cut", "no_token_counted"},
            (LIKELIEST_TOKEN, "reward.function=rewards:in_turn", "algorithm.mask_truncated=true", NO_KL),
        ),
        (
            {"reward_zero", "off_policy", "controller_bound"},
            (
                "reward.function=rewards:nothing",
                "rollout.engine.backend=old",
                "environment={name: slow_environment:Slow, arguments: {seconds: 0.7}}",
                FEW,
            ),
        ),
        (
            {"reward_all_equal", "mismatch_growing"},
            ("reward.function=rewards:constant", "rollout.engine.backend=drifting"),
        ),
        ({"gradient_zero"}, ("algorithm.loss={name: losses:flat, arguments: {}}", NO_KL, FEW)),
    ],
    ids=lambda value: ", ".join(sorted(value)) if isinstance(value, set) else "",
)
def test_alarms_are_set_off_by_their_causes(train, engines, told, causes):
    run = train(*SOUND, *causes, env=engines)
    ended = run.finished()
    rows = alarms(run)
    assert told <= rows.keys()
    for alarm in told:
        row = rows[alarm]
        assert ended.err.count(f"step {row['step']}: {row['said']}. {row['advice']}") == 1
        assert f"{alarm} at step {row['step']}" in ended.out


@pytest.mark.parametrize(("rate", "told"), [("1.0e-5", False), ("0.03", True)])
def test_a_policy_that_runs_away_from_a_sure_reference_is_told(train: Start, sure: Path, rate: str, told: bool):
    run = train(*SOUND, f"model.path={sure}", f"actor.engine.options={{lr: {rate}}}")
    run.finished()
    assert ("kl_runaway" in alarms(run)) == told


@pytest.mark.parametrize(("backend", "told"), [("torch", False), ("sluggish", True)])
def test_a_replica_that_is_slower_than_the_other_is_told(train, engines, backend, told):
    run = train(*SOUND, *OVER_RAY, f"rollout.engine.backend={backend}", env=engines)
    run.finished()
    row = alarms(run).get("replica_slow")
    assert (row is not None) == told
    assert row is None or row["said"].startswith("rollout replica 1 takes ")


def test_steps_that_are_skipped_are_told_before_they_end_the_run(train: Start):
    run = train(*SOUND, "algorithm.loss={name: losses:not_a_number, arguments: {}}", NO_KL)
    ended = run.finish()
    assert ended.code == 1
    assert alarms(run)["steps_skipped"]["step"] == 1
