"""Planning the stages of a step: which there are, in which order, and what each needs."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from distributions import Distributions, distributions  # noqa: F401 - a fixture
from plugin_pages import PagePackage
from projects import Project, project  # noqa: F401 - a fixture
from safetensors.numpy import save_file

from enginehouse.errors import UserError
from enginehouse.plugin import load_plugins
from enginehouse_rl.plan.plan import Plan

LORA = "actor.engine.options.lora={rank: 2}"


def stages_of(planned: Plan) -> list[str]:
    return [stage.name for stage in planned.stages]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["advantage 'grpo'"]),
        (["algorithm.kl.coefficient=0.1"], ["reference", "advantage 'grpo'"]),
        (["algorithm.advantage.name=distillation"], ["reference", "advantage 'distillation'"]),
        (
            [
                "algorithm={advantage: {name: gae}, old_logprobs: actor, kl: {coefficient: 0.1, place: reward}}",
                "reward_model.path=judge",
            ],
            ["reward model", "actor", "reference", "KL term", "critic", "advantage 'gae'"],
        ),
    ],
    ids=["plain", "a KL term in the loss", "a teacher", "all"],
)
def test_a_step_has_the_stages_that_its_config_asks_for(make: Callable[..., Plan], project, overrides, names):  # noqa: F811
    project.make_model("judge")
    assert stages_of(make(*overrides)) == names


@pytest.mark.parametrize(
    ("advantage", "column"), [("grpo", "kl_penalty"), ("rloo", "reward"), ("gae", "token_rewards")]
)
def test_a_kl_term_is_taken_off_the_column_that_the_advantage_reads(make: Callable[..., Plan], advantage, column):
    planned = make(f"algorithm={{advantage: {{name: {advantage}}}, kl: {{coefficient: 0.1, place: reward}}}}")
    assert [stage.adds for stage in planned.stages if stage.name == "KL term"] == [(column,)]


@pytest.fixture
def staged(project: Project, distributions: Distributions) -> Iterator[Callable[..., Plan]]:  # noqa: F811
    """Plans with the package of docs/plugins/stage.md."""
    for name in ("judge", "teacher"):
        project.make_model(name)
    save_file({"lm_head.weight": np.zeros((1, 4), np.float32)}, project.make_model("headless") / "model.safetensors")
    with PagePackage("stage").installed(distributions.site):
        manager = load_plugins(enabled=["torch", "my_stages"], strict=True)
        yield lambda *overrides: project.planned(*overrides, plugins=manager)


MIXTURE = "algorithm.advantage.name=my_mixture"


def test_stages_of_packages_run_where_the_config_names_them_or_the_advantage_needs_their_columns(staged):
    models = "stages={my_teacher: {path: teacher}, my_judge: {path: judge}}"
    planned = staged(MIXTURE, models, "reward_model.path=judge")
    assert stages_of(planned) == [
        "reward model", "stage 'my_judge'", "stage 'my_teacher'", "stage 'my_brevity'", "advantage 'my_mixture'"
    ]  # fmt: skip
    assert {name: role.model.head for name, role in planned.roles.items() if name.startswith("stages.")} == {
        "stages.my_teacher": "causal_lm",
        "stages.my_judge": "value",
    }
    where = "in the actor's processes"
    assert dict(planned.facts)["stages"] == f"my_teacher, by teacher, {where}; my_judge, by judge, {where}"
    assert stages_of(staged("stages={'my-stages:my_brevity': {}}")) == [
        "stage 'my-stages:my_brevity'", "advantage 'grpo'"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stages.my_brevety={}"], r"stages\.my_brevety: unknown stage 'my_brevety'. Did you mean 'my_brevity'"),
        (["stages.my_judge={}"], r"the stage 'my_judge' has a model: set stages\.my_judge\.path to its directory"),
        (["stages.my_brevity.path=judge"], r"the stage 'my_brevity' has no model: stages\.my_brevity may set only"),
        (["stages.my_judge={path: judge, arguments: {wait: 1}}"], r"stages\.my_judge\.arguments.*'wait'"),
        (["stages.my_teacher={path: teacher, arguments: {wait: 1}}"], "the stage has no function that takes arguments"),
        ([MIXTURE], r"needs the column 'my_teacher_logprobs' of the stage 'my_teacher', which has a model: set stages"),
        (["stages.my_teacher.path=nowhere"], r"stages\.my_teacher\.path: .*nowhere"),
        (["stages.my_judge.path=headless"], r"stages\.my_judge\.path must be .* but headless has no score\.weight"),
    ],
)
def test_a_stage_that_cannot_run_is_refused_with_the_key_and_a_cure(staged, overrides: list[str], said: str):
    with pytest.raises(UserError, match=said):
        staged(*overrides)


def test_a_column_that_no_stage_adds_is_refused_with_the_nearest(distributions: Distributions, project: Project):  # noqa: F811
    distributions.add(
        "typo",
        """
        @hookimpl
        def enginehouse_register_advantages(register):
            register(Advantage(name="typo", function="a:b", needs=("reward", "vaules")))

        @hookimpl
        def enginehouse_register_stages(register):
            register(Stage(name="after", function="a:b", needs=("advantages",), adds=("late",)))
        """,
    )
    manager = load_plugins(enabled=["torch", "typo"], strict=True)
    with pytest.raises(UserError, match=r"the column 'vaules', which no earlier stage adds\. Did you mean 'values'"):
        project.planned("algorithm.advantage.name=typo", plugins=manager)
    with pytest.raises(UserError, match=r"the column 'advantages', which no earlier stage adds\. Available"):
        project.planned("stages.after={}", plugins=manager)
