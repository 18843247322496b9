"""A mistake in the input ends the command at once: its message, exit code 2, and nothing was started."""

from pathlib import Path

import pytest

from .conftest import Start

pytestmark = pytest.mark.slow

MISTAKES = {
    "an unknown key": ("train.stepps=5", "Did you mean 'steps'?"),
    "a wrong type": ("train.steps=many", "train.steps"),
    "an unknown backend": ("rollout.engine.backend=torhc", "Did you mean 'torch'?"),
    "more prompts a step than there are": ("train.prompts_per_step=9000", "holds only 8192 prompts"),
    "no data file": ("data.train=nowhere.jsonl", "nowhere.jsonl"),
    "no such column": ("data.prompt=question", "'question'"),
    "a model path that is none": ("model.path=examples/quickstart/wrok", "examples/quickstart/work"),
    "no reward module": ("reward.function=rewardz:troubled", "Did you mean 'reward"),
    "a reward module that fails": ("reward.function=broken:score", "broken.py, line 1"),
}


@pytest.fixture(scope="module")
def without_ray(house: Path) -> dict[str, str]:
    """An environment in which importing ray fails, as would starting it."""
    directory = house / "without-ray"
    directory.mkdir()
    (directory / "ray.py").write_text("raise RuntimeError('ray was imported')\n")
    (house / "broken.py").write_text("import no_such_package_anywhere\n\ndef score(**columns): ...\n")
    return {"PYTHONPATH": str(directory)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_anything_starts(train: Start, without_ray: dict[str, str], mistake: str):
    override, said = MISTAKES[mistake]
    run = train(override, env=without_ray)
    ended = run.finish()
    assert ended.code == 2, ended.err
    assert ended.err.startswith("Error: ")
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert not run.directory.exists()


def test_several_mistakes_are_told_at_once(train: Start, without_ray: dict[str, str]):
    run = train("data.train=nowhere.jsonl", "rollout.engine.backend=torhc", "reward.function=no", env=without_ray)
    ended = run.finish()
    assert ended.code == 2, ended.err
    for said in ("nowhere.jsonl", "torhc", "reward.function"):
        assert said in ended.err
    assert not run.directory.exists()


def test_a_config_that_is_not_there(start: Start, without_ray: dict[str, str]):
    run = start("train", config="examples/quickstart/grop.yaml", env=without_ray)
    ended = run.finish()
    assert ended.code == 2
    assert "Did you mean 'grpo.yaml'?" in ended.err


def test_prompts_that_are_too_long_are_left_out_and_counted(train: Start, house: Path):
    (house / "long.jsonl").write_text(
        "".join(f'{{"prompt": "s{n:06}="}}\n{{"prompt": "s{n:09}="}}\n' for n in range(5))
    )
    files = "data.train=[long.jsonl, examples/quickstart/work/train.jsonl]"
    run = train(files, "data.max_prompt_tokens=8", "data.overlong_prompts=drop", "reward.function=rewards:varied",
                "train.steps=1", "cluster.launcher=inline")  # fmt: skip
    ended = run.finished()
    name = "long.jsonl, examples/quickstart/work/train.jsonl"
    assert run.record["prompts"] == {"used": 8192 + 5, "too_long": {name: 5}}
    assert f"8,197 prompts in {name}, each used 0.00049 times; 5 more are too long and left out" in ended.out
    assert f"5 prompts of {name} are left out: they have more tokens than data.max_prompt_tokens=8" in ended.out
