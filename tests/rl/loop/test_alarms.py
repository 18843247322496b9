"""What is wrong with a run is told in words, each thing once; what is only noise is not; and a run of nothing ends.

Real runs that set each alarm off, and the same runs without the cause, are in tests/integration/test_alarms.py.
"""

import json
import math
import random
import re
from pathlib import Path

import pytest
from projects import Project, project  # noqa: F401 - a fixture

from enginehouse_rl.config.load import keys, load_config
from enginehouse_rl.config.schema import Config
from enginehouse_rl.loop.alarm_inputs import AlarmInputs, read_alarm_inputs
from enginehouse_rl.loop.alarms import ALARMS, LEAST_STEPS, MOST_SKIPPED, Alarms, StepsSkipped
from enginehouse_rl.plan.plan import plan
from enginehouse_rl.runs import Progress, RunDirectory
from enginehouse_rl.runs.history import KEPT, WINDOW
from enginehouse_rl.runs.jsonlines import write_json_lines

LEARNING = {
    "reward/mean": 0.5,
    "reward/max": 1.0,
    "reward/min": 0.0,
    "reward/groups_all_equal": 0.5,
    "response/tokens_mean": 7.0,
    "response/truncated": 0.1,
    "response/truncated_reward": 0.2,
    "response/stopped_reward": 0.6,
    "grad_norm": 0.3,
    "loss": 0.1,
    "skipped": 0.0,
    "optimizer_steps": 4.0,
    "entropy": 1.5,
    "kl": 0.01,
    "mismatch/compared": 1.0,
    "mismatch/absolute_mean": 0.004,
    "rollout/busy_seconds": 2.0,
    "rollout/utilisation": 0.8,
    "rollout/slowest": 1.2,
    "rollout/slowest_replica": 1.0,
    "busy/update": 3.0,
    "busy/update/critic": 4.0,
    "time/generate": 2.5,
    "time/update": 4.0,
    "time/sync": 0.5,
    "time/step": 8.0,
}
SKIPPED = {"skipped": 1.0, "grad_norm": math.nan, "loss": math.nan}
WATCHED = AlarmInputs(grouped=True, compares=True, tolerance=0.2)


class Watch:
    """A run whose metrics are what a test says."""

    def __init__(self, path: Path, watched: AlarmInputs = WATCHED):
        self.run = RunDirectory.create(path / "run", "", overwrite=True)
        self.progress = Progress(mode="quiet")
        self.progress.start(1000)
        self.run.observers.append(self.progress)
        self.alarms = Alarms(self.run, self.progress, watched)

    def take(self, *steps: dict[str, float]) -> list[tuple[int, str]]:
        """Take steps, and return those alarms that came."""
        before = len(self.run.alarms)
        for changed in steps:
            step = self.progress.history.step + 1
            self.progress.step_finished(step, LEARNING | changed)
            self.alarms.check(step)
        return [(row["step"], row["alarm"]) for row in self.run.alarms[before:]]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def test_a_run_that_learns_is_not_spoken_of(watch: Watch, caplog: pytest.LogCaptureFixture):
    assert watch.take(*[{}] * 60) == []
    assert caplog.messages == []
    assert not (watch.run.path / "alarms.jsonl").exists()


@pytest.mark.parametrize("spread", [0.2, 0.5, 0.7])
def test_noise_sets_nothing_off(tmp_path: Path, spread: float):
    """Each figure is lognormal around what it is; a share stays one."""
    dice = random.Random(7)
    watch = Watch(tmp_path)

    def noisy() -> dict[str, float]:
        drawn = {name: value * math.exp(dice.gauss(0, spread)) for name, value in LEARNING.items()}
        shares = ("reward/groups_all_equal", "response/truncated", "rollout/utilisation", "reward/mean")
        fixed = ("skipped", "optimizer_steps", "reward/min", "mismatch/compared")
        replica = {"rollout/slowest_replica": float(dice.randrange(2))}
        drawn |= {name: min(drawn[name], 1.0) for name in shares} | {n: LEARNING[n] for n in fixed} | replica
        drawn["mismatch/absolute_mean"] = min(drawn["mismatch/absolute_mean"], 0.05)
        drawn["time/generate"] = drawn["rollout/busy_seconds"] / drawn["rollout/utilisation"]
        drawn["time/update"] = max(drawn["busy/update"], drawn["busy/update/critic"])
        drawn["time/step"] = drawn["time/generate"] + drawn["time/update"] + 1.0
        return drawn

    assert watch.take(*(noisy() for _ in range(1500))) == []


ZERO = {"reward/max": 0.0, "reward/mean": 0.0, "reward/groups_all_equal": 1.0, "grad_norm": 0.0}
PAID_TO_GO_ON = {
    "response/truncated": 0.8, "response/truncated_reward": 0.5, "response/stopped_reward": 0.1,
}  # fmt: skip
COLLAPSED = {"entropy": 0.05, "reward/groups_all_equal": 0.95, "reward/max": 0.3, "reward/mean": 0.3}


@pytest.mark.parametrize(
    ("alarm", "changed", "after"),
    [
        ("reward_zero", ZERO, WINDOW),
        ("reward_all_equal", ZERO | {"reward/max": 1.0, "reward/min": 1.0}, WINDOW),
        ("gradient_zero", {"grad_norm": 0.0}, WINDOW),
        ("no_token_counted", {"skipped": 1.0, "grad_norm": 0.0}, WINDOW),
        ("responses_cut", {"response/truncated": 1.0}, WINDOW / 2),
        ("responses_cut", PAID_TO_GO_ON, WINDOW * 0.7),
        ("entropy_collapse", COLLAPSED, WINDOW * 0.7),
        ("kl_runaway", {"kl": 3.5}, WINDOW * 0.7),
        ("mismatch_growing", {"mismatch/absolute_mean": 0.04}, WINDOW * 0.7),
        ("replica_slow", {"rollout/slowest": 3.0, "rollout/slowest_replica": 1.0}, WINDOW / 2),
        ("controller_bound", {"time/step": 20.0}, WINDOW / 2),
        ("steps_skipped", {"skipped": 0.25, "grad_norm": math.inf}, 1),
        ("engines_apart", {"mismatch/absolute_mean": 0.06}, 1),
        ("off_policy", {"mismatch/compared": 0.75}, 1),
    ],
)
def test_what_lasts_is_told_once_at_its_step_and_what_passes_is_not(tmp_path, caplog, alarm, changed, after):
    passing = [changed] * (math.ceil(after / 2) - 1)
    assert Watch(tmp_path).take(*[{}] * 20, *passing, *[{}] * 20, *passing) == []
    watch = Watch(tmp_path)
    assert watch.take(*[{}] * 20) == []
    ((step, told),) = watch.take(*[changed] * 3 * KEPT)
    assert told == alarm
    assert after <= step - 20 <= after + 2
    (row,) = map(json.loads, (watch.run.path / "alarms.jsonl").read_text().splitlines())
    assert row["step"] == step
    assert caplog.messages == [f"step {step}: {row['said']}. {row['advice']}"]
    assert list(watch.progress.alarms) == [row]


def test_the_words_say_from_what_to_what_over_which_steps(watch: Watch):
    watch.take(*[{}] * 20, *[COLLAPSED] * WINDOW)
    (row,) = watch.run.alarms
    assert row["said"].startswith("the entropy collapsed, from 1.5 (steps 1 to 10) to 0.05 (steps 19 to 28), in nats")
    assert "the mean reward is 0.3 and the best reward of a response was 1" in row["said"]


def test_an_entropy_that_falls_as_the_best_answer_is_found_is_none(watch: Watch):
    """As in the quickstart: from 1.5 to 0.015, all samples right in the end."""
    right = {"reward/mean": 0.97, "reward/groups_all_equal": 0.95}
    assert watch.take(*[{}] * 20, *[{"entropy": 0.015} | right] * 100) == []


def test_a_reward_that_stands_still_where_samples_still_differ_is_no_collapse(watch: Watch):
    """As in the recipe `grpo` about step 140."""
    assert watch.take(*[{}] * 20, *[{"entropy": 0.05, "reward/mean": 0.8}] * 100) == []


def test_an_entropy_that_falls_while_the_reward_rises_is_none(watch: Watch):
    """The quickstart, on some processors: at step 156 one reward in nine was missed, and at the end one in thirty."""
    rising = [
        {"entropy": 0.04, "reward/groups_all_equal": 0.85, "reward/mean": 0.8 + step / 1000} for step in range(100)
    ]
    assert watch.take(*[{}] * 20, *rising) == []
    assert [told for _, told in watch.take(*[rising[-1] | {"reward/mean": 0.85}] * KEPT)] == ["entropy_collapse"]


def test_an_entropy_that_falls_without_a_mean_reward_to_judge_by_is_none(watch: Watch):
    """Of rewards that are infinite, say."""
    assert watch.take(*[{}] * WINDOW, *[COLLAPSED | {"reward/mean": math.inf}] * KEPT) == []


def test_where_samples_are_single_a_reward_that_stands_still_tells_a_collapse(tmp_path: Path):
    single = {"reward/groups_all_equal": 1.0, "reward/mean": 0.05}
    fallen = [{"entropy": 0.05, "reward/mean": 0.1 + step / 200, "reward/groups_all_equal": 1.0} for step in range(60)]
    watch = Watch(tmp_path, AlarmInputs())
    assert watch.take(*[single] * 20, *fallen) == []  # it rises
    assert [told for _, told in watch.take(*[fallen[-1] | {"reward/mean": 0.4}] * KEPT)] == ["entropy_collapse"]


def test_what_is_advised_of_a_kl_that_runs_away_is_possible_where_its_term_is():
    """`plan` refuses a target of a term in the loss."""
    (alarm,) = (alarm for alarm in ALARMS if alarm.name == "kl_runaway")
    assert (
        "Raise algorithm.kl.coefficient (with algorithm.kl.place=reward, algorithm.kl.target adapts it)" in alarm.advice
    )


def test_a_kl_that_begins_far_away_and_falls_runs_nowhere(watch: Watch):
    """As when a teacher is the reference."""
    assert watch.take(*[{"kl": 8 / step} for step in range(1, 60)]) == []


def test_no_change_is_seen_before_there_is_something_to_compare_with(watch: Watch):
    steps = [{"kl": 0.01 * 4**step} for step in range(2 * LEAST_STEPS)]
    assert watch.take(*steps[:-1]) == []
    assert watch.take(steps[-1]) == [(2 * LEAST_STEPS, "kl_runaway")]


def test_what_is_the_cause_is_told_and_not_what_comes_of_it(watch: Watch):
    assert watch.take(*[ZERO] * 3 * WINDOW) == [(WINDOW, "reward_zero")]
    equal = ZERO | {"reward/max": 1.0, "reward/min": 1.0}
    assert watch.take(*[equal] * WINDOW) == [(WINDOW * 3 + 1, "reward_all_equal")]


@pytest.mark.parametrize(
    ("overrides", "compares", "rewarded"),
    [
        ([], True, True),
        (["rollout.samples_per_prompt=1", "algorithm.advantage={name: reinforce_plus_plus}"], False, True),
        (["algorithm.advantage={name: reinforce_plus_plus}"], False, True),
        (["algorithm.advantage={name: distillation}"], False, False),
    ],
    ids=["grpo", "single samples", "against the batch", "a teacher"],
)
def test_what_advantages_come_of_is_known(project: Project, overrides: list[str], compares: bool, rewarded: bool):  # noqa: F811
    config = load_config(project.save(), ["rollout.samples_per_prompt=4", *overrides], Config)
    watched = read_alarm_inputs(plan(config))
    assert (watched.compares, watched.rewarded, watched.scored) == (compares, rewarded, True)


@pytest.mark.parametrize(
    ("place", "says"), [("reward", "only the KL term"), ("loss", "comparing them teaches nothing")]
)
def test_equal_rewards_with_a_kl_term_in_them_are_said_to_teach_that_alone(
    project,  # noqa: F811
    tmp_path,
    place,
    says,
):
    overrides = ["rollout.samples_per_prompt=4", f"algorithm.kl={{coefficient: 0.1, place: {place}}}"]
    config = load_config(project.save(), overrides, Config)
    watched = read_alarm_inputs(plan(config))
    watch = Watch(tmp_path, watched)
    watch.take(*[ZERO | {"reward/max": 1.0, "reward/min": 1.0}] * WINDOW)
    (alarm,) = watch.run.alarms
    assert alarm["alarm"] == "reward_all_equal"
    assert says in str(alarm)


def test_a_reward_that_trains_nothing_sets_nothing_off(tmp_path: Path):
    """As in the recipe `distill`, where a teacher rates each token."""
    watch = Watch(tmp_path, AlarmInputs(grouped=True, tolerance=0.2, rewarded=False))
    assert watch.take(*[{}] * 20, *[COLLAPSED] * KEPT, *[ZERO | {"grad_norm": 0.3}] * KEPT) == []


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"time/reward": 12.0}, "the reward"),
        ({"time/generate": 14.5, "episode/in_tools": 0.9}, "the environment and its tools"),
        ({"time/generate": 14.5}, "the controller"),
    ],
)
def test_what_a_step_waits_for_while_no_role_works_is_named(watch: Watch, changed: dict[str, float], cause: str):
    watch.take(*[{"time/step": 20.0} | changed] * WINDOW)
    (row,) = watch.run.alarms
    assert row["alarm"] == "controller_bound"
    assert f"of the 20 seconds of a step (in steps 1 to 10) are spent waiting for {cause}: " in row["said"]


def test_a_slow_replica_is_always_the_same(watch: Watch):
    turns = [{"rollout/slowest": 5.0, "rollout/slowest_replica": float(step % 2)} for step in range(40)]
    assert watch.take(*turns) == []


@pytest.mark.parametrize(
    ("changed", "watched"),
    [
        ({"reward/groups_all_equal": 1.0}, AlarmInputs()),
        ({"mismatch/compared": 0.75}, AlarmInputs(stale=True)),
        ({"time/step": 0.4, "time/generate": 0.0, "time/update": 0.1, "time/sync": 0.0}, WATCHED),
        ({"time/step": 20.0, "time/reward": 12.0}, AlarmInputs(grouped=True, tolerance=0.2, scored=False)),
    ],
    ids=[
        "single samples are no groups",
        "staleness was asked for",
        "steps are too short to matter",
        "a model scores",
    ],
)
def test_what_is_as_it_has_to_be_is_not_told(tmp_path: Path, changed: dict[str, float], watched: AlarmInputs):
    assert Watch(tmp_path, watched).take(*[changed] * 30) == []


def test_the_tolerance_of_the_config_says_when_engines_are_apart(tmp_path: Path):
    assert Watch(tmp_path, AlarmInputs(tolerance=0.001)).take({}) == [(1, "engines_apart")]


@pytest.mark.parametrize(("nats", "told"), [(0.3, []), (0.6, [(1, "engines_apart")])])
def test_engines_of_which_one_is_quantized_may_be_further_apart(tmp_path: Path, nats, told):
    watched = AlarmInputs(tolerance=1.5, quantizes=True)
    assert Watch(tmp_path, watched).take({"mismatch/absolute_mean": nats}) == told


def test_a_resumed_run_compares_with_its_beginning_and_tells_nothing_again(tmp_path: Path):
    rows = [{"step": step, "elapsed_seconds": 1.0, **LEARNING} for step in range(1, 31)]
    watch = Watch(tmp_path)
    write_json_lines(watch.run.path / "metrics.jsonl", rows)
    watch.progress.remember(watch.run.path)
    watch.run.alarms = [{"step": 9, "alarm": "responses_cut", "said": "", "advice": ""}]
    again = Alarms(watch.run, watch.progress, WATCHED)
    watch.alarms = again
    assert watch.take(*[{"response/truncated": 1.0, "kl": 3.5}] * WINDOW) == [(38, "kl_runaway")]


def test_the_first_skipped_step_is_told_and_so_many_in_a_row_end_the_run(watch: Watch):
    skipped = [SKIPPED] * (MOST_SKIPPED - 1)
    watch.take({}, *skipped, {}, *skipped)
    (row,) = watch.run.alarms
    assert row["step"] == 2
    assert row["said"].startswith("4 of 4 optimizer steps were skipped, as their gradient was not finite (loss nan")
    with pytest.raises(StepsSkipped, match=r"of steps 5 to 7 was skipped.*loss nan.*as after step 4\..*smaller actor"):
        watch.take(SKIPPED)
    assert StepsSkipped.keeps_state


def test_roles_beside_the_actor_are_looked_at_too(tmp_path: Path):
    watch = Watch(tmp_path, AlarmInputs(other_roles=["critic"]))
    skipped = {"critic/skipped": 1.0, "critic/grad_norm": math.inf, "critic/optimizer_steps": 2.0}
    watch.take(*[skipped] * (MOST_SKIPPED - 1))
    (row,) = watch.run.alarms
    assert row["said"].startswith("2 of 2 optimizer steps of the critic were skipped")
    with pytest.raises(StepsSkipped, match="of the critic of steps 1 to 3"):
        watch.take(skipped)


def test_one_optimizer_step_of_several_does_not_count_as_a_skipped_step(watch: Watch):
    watch.take(*[{"skipped": 0.25, "grad_norm": math.inf}] * 10)
    assert watch.run.alarms[0]["said"].startswith("1 of 4 optimizer steps")


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda alarm: alarm.name)
def test_each_advice_names_keys_that_exist(alarm):
    named = re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+", alarm.advice)
    of_functions = ("actor.engine.options.", "algorithm.loss.arguments.")
    files = {"run.json", "timeline.json"}
    known = {".".join(key) for key in keys(Config)}
    wanted = [name for name in named if name not in files]
    assert wanted
    assert [name for name in wanted if name not in known and not name.startswith(of_functions)] == []
