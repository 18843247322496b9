"""The quickstart's data, model and configs."""

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from enginehouse_recipes import sorting
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import SFTConfig

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
NAMES = ("train", "validation", "demonstrations", "pairs", "validation_pairs")
sorted_digits = runpy.run_path(str(QUICKSTART / "reward.py"))["sorted_digits"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("task")
    sorting.make_data(directory, seed=0)
    return directory


def rows(task: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (task / f"{name}.jsonl").read_text().splitlines()]


def test_no_prompt_is_in_two_files_or_twice_in_one(task):
    prompts = [row["prompt"] for name in NAMES for row in rows(task, name)]
    assert len(prompts) == len(set(prompts))


def test_there_are_prompts_for_every_step_and_demonstrations_for_the_warm_up(task):
    grpo, sft = load_config(QUICKSTART / "grpo.yaml"), load_config(QUICKSTART / "sft.yaml", schema=SFTConfig)
    assert len(rows(task, "train")) >= grpo.train.steps * grpo.train.prompts_per_step
    assert len(rows(task, "demonstrations")) >= sft.train.steps * sft.train.rows_per_step


def test_demonstrations_show_the_format_but_hardly_ever_the_answer(task):
    demonstrations = rows(task, "demonstrations")
    right = [sorted_digits(row["prompt"], row["response"], finish_reason="stop") for row in demonstrations]
    assert all(len(row["response"]) == 6 and row["response"].isdigit() for row in demonstrations)
    assert sum(right) / len(right) < 0.08


def test_answers_and_chosen_responses_are_right_and_rejected_ones_wrong(task):
    def right(row: dict[str, str], column: str) -> float:
        return sorted_digits(row["prompt"], row[column], finish_reason="stop")

    assert all(right(row, "answer") for name in ("train", "validation") for row in rows(task, name))
    pairs = [row for name in ("pairs", "validation_pairs") for row in rows(task, name)]
    assert all(right(row, "chosen") and not right(row, "rejected") for row in pairs)


def test_the_same_seed_makes_the_same_files_and_another_seed_others(task, tmp_path):
    sorting.make_data(tmp_path / "same", seed=0)
    sorting.make_data(tmp_path / "other", seed=1)
    for name in NAMES:
        assert rows(tmp_path / "same", name) == rows(task, name)
        assert rows(tmp_path / "other", name) != rows(task, name)


def test_the_reward_asks_for_the_right_digits_and_an_end():
    assert sorted_digits("s524310=", "012345", finish_reason="stop") == 1.0
    assert sorted_digits("s525310=", "012355", finish_reason="stop", index=7) == 1.0
    assert sorted_digits("s524310=", "012345", finish_reason="length") == 0.0
    assert sorted_digits("s524310=", "012354", finish_reason="stop") == 0.0
    assert sorted_digits("s524310=", "0123455", finish_reason="stop") == 0.0


def test_the_model_loads_as_a_small_qwen3_with_a_head_of_its_own(tmp_path):
    from transformers import AutoModelForCausalLM

    sorting.make_model(tmp_path, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3"
    assert model.num_parameters() == 126_912
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_every_character_is_a_token_and_decodes_to_itself(tmp_path):
    from transformers import AutoTokenizer

    sorting.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("s524310=")["input_ids"]
    assert len(tokenizer) == 28
    assert len(ids) == 8
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "s524310="


def test_one_line_of_the_config_moves_the_rollout_to_processes_of_its_own(tmp_path):
    text = (QUICKSTART / "grpo.yaml").read_text()
    (tmp_path / "separate.yaml").write_text(text.replace("placement: auto", "placement: separate"))
    together, apart = load_config(QUICKSTART / "grpo.yaml"), load_config(tmp_path / "separate.yaml")
    assert together.rollout.placement == "auto"
    assert apart == together.model_copy(
        update={"rollout": together.rollout.model_copy(update={"placement": "separate"})}
    )


def test_the_script_writes_to_free_directories_and_deletes_nothing(tmp_path):
    script = tmp_path / "examples" / "quickstart" / "run.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(QUICKSTART / "run.sh", script)
    for name in ("python", "enginehouse"):  # stand-ins that make the run's directory and note what they were told
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(
            f'#!/bin/sh\necho "{name} $*" >> told\n'
            'for word in "$@"; do case $word in run.directory=*) mkdir -p "${word#run.directory=}";; esac; done\n'
        )
        command.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for _ in range(3):
        subprocess.run([script, "train.steps=3"], env=env, check=True, capture_output=True)
    told = [line for line in (tmp_path / "told").read_text().splitlines() if line.startswith("enginehouse")]
    for number, (warm_up, run) in enumerate(zip(told[::2], told[1::2], strict=True), start=1):
        suffix = "" if number == 1 else f"-{number}"
        assert warm_up.endswith(f" run.directory=runs/quickstart-sft{suffix}")
        assert run.endswith(
            f" model.path=runs/quickstart-sft{suffix}/model run.directory=runs/quickstart{suffix} train.steps=3"
        )


def test_the_shipped_configs_delete_nothing():
    assert not load_config(QUICKSTART / "grpo.yaml").run.overwrite
    assert not load_config(QUICKSTART / "sft.yaml", schema=SFTConfig).run.overwrite
