"""`enginehouse recipes`: every recipe says whose it is, is planned, and can be kept; one runs from nothing."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from projects import Project

from enginehouse.cli.main import main
from enginehouse.plugin import load_plugins
from enginehouse_recipes import DIRECTORY, chat, needs, recipe, recipes
from enginehouse_recipes.cli.recipes import make_beginning
from enginehouse_recipes.sums import make_sums
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import SCHEMAS
from enginehouse_rl.metrics import find_metric
from enginehouse_rl.plan.plan import PLANS

COMMANDS = dict.fromkeys(("ppo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "distill"), "train")
COMMANDS |= {"sft": "sft", "dpo": "dpo", "rm": "rm"}
GAMES = ("guessing_game", "gym", "calculator", "openai_agent")
COMMANDS |= {"sft_chat": "sft"} | dict.fromkeys(GAMES, "train")
COMMANDS |= {"real/grpo": "train", "real/sft": "sft", "real/dpo": "dpo", "real/lora": "train", "real/ppo": "train"}
COMMANDS |= {"real/agent": "train"}
ROWS = {
    "train": {"prompt": "s10=", "answer": "01"},
    "demonstrations": {"prompt": "s10=", "response": "01"},
    "pairs": {"prompt": "s10=", "chosen": "01", "rejected": "10"},
}
ASKED = {"prompt": "What is 6 * 7", "answer": "42", "secret": 42, "seed": 1}
every_recipe = pytest.mark.parametrize("name", COMMANDS)


def recipes_command(*words: str) -> Result:
    return CliRunner().invoke(main, ["recipes", *words])


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with stand-ins for what recipes begin from."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / DIRECTORY
    root.mkdir(parents=True)
    project = Project(root)
    for name in ("task", "sft", "grpo", "chat", "sft_chat"):
        (root / name).mkdir()
        project.make_model(f"{name}/model", chat.make_tokenizer() if name == "sft_chat" else None)
    make_sums(root / "sums")
    for name in ("smollm2-135m-instruct", "real/sft/model"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        project.make_model(name, chat.make_tokenizer(), max_position_embeddings=512)
    for name, row in ROWS.items():
        project.write_rows(f"task/{name}.jsonl", [row] * 256)
    project.write_rows("task/validation.jsonl", [ROWS["train"]])
    project.write_rows("task/validation_pairs.jsonl", [ROWS["pairs"]])
    project.write_rows("chat/demonstrations.jsonl", [ROWS["demonstrations"]] * 256)
    for name in ("guessing_game", "gym", "calculator"):
        project.write_rows(f"chat/{name}.jsonl", [ASKED] * 256)
        project.write_rows(f"chat/{name}_validation.jsonl", [ASKED])
    return tmp_path


def test_the_list_has_every_recipe_with_its_command_and_source():
    listed = recipes_command("list").stdout
    assert recipes().keys() == COMMANDS.keys()
    for name, command in COMMANDS.items():
        assert re.search(rf"^{name} +{command} +\S", listed, re.MULTILINE)


@every_recipe
def test_a_header_names_the_source_the_differences_and_the_command(name: str):
    header = recipes_command("show", name).stdout.partition("\n\n")[0]
    assert re.match(r"# [^\n]+ \([A-Z][^\n]+ 20\d\d[^\n]*\)", header)
    assert re.search(r"# Differs: .+", header) or name.startswith("sft")
    assert f"#   enginehouse recipes prepare {name} " in header
    assert f"#   enginehouse {COMMANDS[name]} {name.replace('/', '-')}.yaml" in header


@every_recipe
def test_what_is_shown_can_be_kept_and_is_planned(prepared: Path, name: str):
    kept = prepared / f"{name.replace('/', '-')}.yaml"
    kept.write_text(recipes_command("show", name).stdout)
    config = load_config(kept, ["run.directory=runs/mine"], SCHEMAS[COMMANDS[name]])
    assert PLANS[COMMANDS[name]](config, load_plugins(enabled=("torch", "fsdp", "environments")), kept).roles["actor"]


@pytest.mark.parametrize("name", ["real/grpo", "sums"])
def test_sums_may_begin_from_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("enginehouse_recipes.cli.recipes._run", lambda chosen, overrides, *_: ran.append(overrides))
    ran: list[tuple[str, ...]] = []
    assert recipes_command("run", name, "--model", "mine", "train.steps=2").exit_code == 0
    assert ran == [("train.steps=2", "model.path=mine")]
    train, held_out = (
        {json.loads(line)["prompt"][0]["content"] for line in (DIRECTORY / "sums" / file).open()}
        for file in ("train.jsonl", "validation.jsonl")
    )
    assert (len(train), len(held_out), train & held_out) == (836, 64, set())


def test_no_sum_that_is_held_out_is_learned_from_in_any_form(tmp_path: Path):
    make_sums(tmp_path / "sums")
    rows = {file.stem: [json.loads(line) for line in file.open()] for file in (tmp_path / "sums").iterdir()}
    held_out = {row["prompt"][0]["content"] for row in rows["validation"]}
    assert len(held_out) == 64
    for name in ("train", "demonstrations", "pairs"):
        learned, kept = (
            {row["prompt"][0]["content"] for row in rows[file]}
            for file in (name, f"validation_{name}".removesuffix("_train"))
        )
        assert (len(learned), kept) == (836, held_out)
        assert not learned & held_out
    answers = {row["prompt"][0]["content"]: row["answer"] for row in rows["train"]}
    assert all(row["response"] == answers[row["prompt"][0]["content"]] for row in rows["demonstrations"])
    assert all(row["chosen"] == answers[row["prompt"][0]["content"]] != row["rejected"] for row in rows["pairs"])


def test_a_recipe_begins_from_what_its_paths_name():
    def needed(name: str, *overrides: str) -> list[str]:
        config = load_config(recipe(name).path, overrides, SCHEMAS[COMMANDS[name]])
        return needs(config.model_dump())

    assert needed("sft") == ["task"]
    assert needed("ppo") == ["sft", "task"]
    assert needed("distill") == ["sft", "task", "grpo"]
    assert needed("real/grpo") == ["smollm2-135m-instruct", "sums"]
    assert needed("real/dpo") == ["real/sft", "sums"]
    assert needed("gym") == ["sft_chat", "chat"]
    assert needed("distill", "reference.path=elsewhere", "run.directory=runs/recipes/mine") == ["sft", "task"]


@pytest.mark.parametrize(("left", "overrides"), [("run.json", ("run.overwrite=true",)), ("checkpoints", ())])
def test_a_beginning_that_failed_is_made_anew_or_gone_on_with(tmp_path, monkeypatch, left, overrides):
    monkeypatch.chdir(tmp_path)
    (tmp_path / DIRECTORY / "task").mkdir(parents=True)
    (tmp_path / DIRECTORY / "sft").mkdir()
    (tmp_path / DIRECTORY / "sft" / "run.json").write_text('{"status": "failed"}')
    runs = []
    monkeypatch.setattr("enginehouse_rl.config.earlier_run.can_resume", lambda directory: left == "checkpoints")
    monkeypatch.setattr(
        "enginehouse_recipes.cli.recipes._run", lambda chosen, *given: runs.append((chosen.name, *given))
    )
    make_beginning(recipe("ppo"), (), quiet=True)
    assert runs == [("sft", overrides, left == "checkpoints", True)]


@pytest.mark.parametrize("verb", ["show", "prepare", "run"])
def test_an_unknown_recipe_is_refused_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str):
    monkeypatch.chdir(tmp_path)
    done = recipes_command(verb, "gppo")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: unknown recipe 'gppo'. Did you mean 'ppo'? Available: ppo, gspo, grpo and ")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_an_override_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = recipes_command("run", "ppo", "train.stepps=3")
    assert done.exit_code == 2
    assert "unknown key 'train.stepps'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_recipe_whose_environment_is_not_installed_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("enginehouse.plugin.plugins", lambda: load_plugins(entry_points=[]))
    done = recipes_command("run", "gym")
    assert done.exit_code == 2
    assert re.search(
        r"unknown environment 'gym'.* Not installed: environments \(pip install \S+environments", done.stderr
    )
    assert not list(tmp_path.iterdir())


def test_a_model_that_no_recipe_makes_is_not_there(prepared: Path):
    done = recipes_command("run", "dpo", "model.path=runs/recipes/sff/model")
    assert done.exit_code == 2
    assert "runs/recipes/sff/model does not exist" in done.stderr


@pytest.mark.slow
@pytest.mark.sources("README.md", "plugins/recipes/src/enginehouse_recipes/")
def test_every_recipe_runs_and_makes_first_what_it_begins_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    inline = ("cluster.launcher=inline", "cluster.device=cpu")
    others = [name for name in COMMANDS if name not in ("sft", "sft_chat", *GAMES) and "/" not in name]
    for name in (*others, "sft"):
        overrides = [] if name == "sft" else ["data.validation=null", "train.validate_every=0"]
        overrides += ["reference.path=runs/recipes/sft/model"] if name == "distill" else []
        here = f"run.directory=runs/{name}"
        done = recipes_command("run", name, "train.steps=2", here, *overrides, *inline)
        assert done.exit_code == 0, done.output
        made = "begins from the model of the recipe sft: making it" in done.stdout
        assert made == (name == others[0])
        lines = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").open()]
        assert [line["step"] for line in lines] == [1, 2]
        assert all(line["grad_norm"] > 0 for line in lines)
        assert all(map(find_metric, lines[-1]))
        assert (tmp_path / "runs" / name / "model").exists()


@pytest.mark.slow
@pytest.mark.sources("plugins/recipes/src/enginehouse_recipes/")
def test_every_game_runs_and_is_rewarded_by_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a model that has hardly seen a demonstration, so that nothing here is learned."""
    monkeypatch.chdir(tmp_path)
    for name, count in {"ROWS": 64, "VALIDATION_ROWS": 4, "DEMONSTRATIONS": 200, "WALKS": 50}.items():
        monkeypatch.setattr(chat, name, count)
    shortly = ("train.steps=2", "cluster.launcher=inline", "cluster.device=cpu")
    assert recipes_command("run", "sft_chat", *shortly).exit_code == 0
    for name in GAMES:
        done = recipes_command("run", name, "train.prompts_per_step=2", "rollout.samples_per_prompt=2", *shortly)
        assert done.exit_code == 0, done.output
        (*_, last) = [json.loads(line) for line in (tmp_path / DIRECTORY / name / "validation.jsonl").open()]
        assert 0.0 <= last["validation/reward"] <= 1.0
        assert all(map(find_metric, last))
    few = ("evaluation.max_prompts=4", "train.prompts_per_step=2", "rollout.samples_per_prompt=2")
    done = recipes_command("run", "real/grpo", "--model", "runs/recipes/sft_chat/model", *few, *shortly)
    assert done.exit_code == 0, done.output
