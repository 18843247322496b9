"""Tasks of reasoning_gym by name: its questions, answered once, and scores as its own scorers give them."""

import random
import re
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from agent_plays import Scripted, play
from chat_templates import make_tokenizer

from enginehouse.engines.environment import Task
from enginehouse.errors import ConfigError, DataError
from enginehouse_environments.reasoning_gym import FIRST_UNNUMBERED, Mixture, ReasoningGym, read_specs

create_dataset = pytest.importorskip("reasoning_gym").create_dataset
factory = pytest.importorskip("reasoning_gym.factory")
DEFAULT = pytest.importorskip("reasoning_gym.utils").SYSTEM_PROMPTS["default"]
SUMS: dict[str, Any] = {"name": "chain_sum", "min_terms": 2, "max_terms": 2, "max_digits": 1}


def played(said: str, index: int | None = 3, samples: int = 2, **arguments: Any):
    fleet = Scripted(make_tokenizer(), lambda text, number: said)
    columns = {} if index is None else {"index": index}
    task = Task(7, [1], "question 7", None, columns)
    return play(ReasoningGym(**{"tasks": ["chain_sum"], **arguments}), fleet, task, samples=samples)


def test_a_question_is_asked_with_the_system_prompt_of_the_package_and_scored_by_its_scorer():
    entry = create_dataset("chain_sum", seed=0)[3]
    right, _ = played(f"I add. <answer> {entry['answer']} </answer>")
    assert entry["question"] in right.prompt
    assert "question 7" not in right.prompt
    assert DEFAULT in right.prompt
    assert (right.score.reward, right.score.figures) == (1.0, {"chain_sum": 1.0})
    assert right.score.answer == entry["answer"]
    partly, _ = played(f"<answer>it is {entry['answer']}</answer>")
    assert partly.score.reward == create_dataset("chain_sum", seed=0).score_answer(f"it is {entry['answer']}", entry)
    assert 0 < partly.score.reward < 1
    untagged, _ = played(entry["answer"])
    assert untagged.score.reward == 0.0


def test_a_system_prompt_of_ones_own_may_have_the_whole_response_as_the_answer():
    entry = create_dataset("chain_sum", seed=0)[3]
    for system in ("Answer with a number.", None):
        episode, _ = played(f" {entry['answer']} ", system_prompt=system, answer="whole")
        assert DEFAULT not in episode.prompt
        assert (system or "") in episode.prompt
        assert episode.score.reward == 1.0


def test_rows_without_a_number_get_questions_that_no_numbered_row_has():
    (episode,) = played("no", index=None, samples=1)
    assert Mixture(read_specs(["chain_sum"]), 0).draw(FIRST_UNNUMBERED + 7).entry["question"] in episode.prompt
    with pytest.raises(DataError, match="the column 'index' must hold a whole number of at least 0, not -1"):
        played("no", index=-1)


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic"])
def test_there_are_questions_beyond_the_size_of_a_task_and_they_do_not_come_again(name: str):
    mixture = Mixture(read_specs([{"name": name, "size": 20}]), 5)
    numbers = [*range(40), *range(FIRST_UNNUMBERED, FIRST_UNNUMBERED + 40)]
    asked = [mixture.draw(number).entry["question"] for number in numbers]
    own = create_dataset(name, seed=5, size=20)
    assert asked[:20] == [own[number]["question"] for number in range(20)]
    assert asked == [Mixture(read_specs([{"name": name, "size": 20}]), 5).draw(n).entry["question"] for n in numbers]
    assert len(set(asked)) > 75


@pytest.mark.parametrize("name", ["list_functions", "pool_matrix"])
def test_tasks_that_draw_from_the_process_give_the_same_question_and_leave_its_state(name: str):
    states = random.getstate(), np.random.get_state()[1].tolist()
    first = [Mixture(read_specs([name]), 5).draw(index).entry["question"] for index in range(40)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    random.random()
    assert [Mixture(read_specs([name]), 5).draw(index).entry["question"] for index in range(40)] == first


def test_tasks_are_mixed_by_their_weights():
    mixture = Mixture(read_specs(["gcd", {**SUMS, "weight": 3}]), 0)
    drawn = Counter(mixture.draw(index).task for index in range(400))
    assert drawn["chain_sum"] == pytest.approx(300, abs=30)


def test_parameters_and_levels_of_curricula_are_those_of_the_package():
    (spec,) = read_specs([{**SUMS, "level": {"num_digits": 2}}])
    assert (spec.config.max_terms, spec.config.max_digits) == (2, 1)  # what is said itself goes before the level
    for level in (0, 2, 99):
        curriculum = factory.create_curriculum("chain_sum")
        curriculum.set_global_level(level)
        (spec,) = read_specs([{"name": "chain_sum", "level": level}])
        assert spec.config == curriculum.generate_configuration()


def test_an_answer_that_a_scorer_cannot_read_has_no_reward():
    with pytest.raises(ValueError, match="invalid literal"):
        create_dataset("prime_factorization", seed=0).score_answer(
            "x", create_dataset("prime_factorization", seed=0)[0]
        )
    episode, _ = played("<answer>x</answer>", tasks=["prime_factorization"])
    assert (episode.score.reward, episode.score.failure) == (0.0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tasks": ["chain_sums"]}, "tasks: reasoning_gym has no task 'chain_sums'. Did you mean 'chain_sum'?"),
        ({"tasks": ["composite"]}, "tasks: reasoning_gym has no task 'composite'"),
        ({"tasks": [{"weight": 2}]}, "tasks: reasoning_gym has no task None"),
        ({"tasks": ["gcd", {"name": "gcd"}]}, "tasks: 'gcd' is named twice; give it a weight instead"),
        ({"tasks": [{"name": "gcd", "weight": 0}]}, "tasks: the weight of 'gcd' must be a number above 0, not 0"),
        ({"tasks": [SUMS | {"max_term": 3}]}, "'chain_sum' has no parameter 'max_term'. Did you mean 'max_terms'?"),
        ({"tasks": [SUMS | {"max_terms": 1}]}, "parameters of 'chain_sum' are invalid: max_terms must be >= min_terms"),
        ({"tasks": [SUMS | {"max_terms": "x"}]}, "parameters of 'chain_sum' are invalid: '>=' not supported"),
        ({"tasks": [SUMS | {"level": {"terms": 1}}]}, "has no attribute 'terms'. Did you mean 'num_terms'?"),
        ({"tasks": [SUMS | {"level": {"num_terms": 99}}]}, "parameters of 'chain_sum' are invalid: Invalid level: 99"),
        ({"tasks": [SUMS | {"level": -1}]}, "parameters of 'chain_sum' are invalid: Invalid level: -1"),
        ({"tasks": ["gcd"], "system_prompt": "zero"}, "system_prompt: reasoning_gym has no system prompt 'zero'"),
        ({"tasks": ["gcd"], "index": "indx"}, "index: the data has no column 'indx'. Did you mean 'index'?"),
    ],
)
def test_plan_refuses_what_the_package_does_not_have(arguments: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        ReasoningGym.check(arguments, ["index"])
    assert "\n" not in str(refused.value)
    ReasoningGym.check({"tasks": ["chain_sum"]}, ["index"])


def test_plan_says_how_the_package_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    cure = re.escape("Try: pip install 'enginehouse-environments[reasoning-gym]'")
    with pytest.raises(ConfigError, match=cure):
        ReasoningGym.check({"tasks": ["chain_sum"]}, None)


@pytest.mark.slow
def test_every_task_is_asked_and_its_own_answer_is_right():
    for name in sorted(factory.DATASETS.keys() - {"composite"}):
        question = Mixture(read_specs([name]), 1).draw(FIRST_UNNUMBERED + 1)
        answer = question.entry["answer"]
        assert answer is None or question.score(answer).reward == 1.0, name
        assert 0 <= question.score("{}").reward <= 1, name
