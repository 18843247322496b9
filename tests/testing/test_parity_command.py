"""`enginehouse parity`: two real engines in this process, what is said of them, and how it exits."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from projects import Project, project  # noqa: F401 - a fixture

from enginehouse.cli.main import main
from enginehouse_testing.models import tiny_model
from enginehouse_torch.rollout import TorchRolloutEngine

SAMPLES, PROMPTS = 4, 6


@pytest.fixture
def compare(project: Project):  # noqa: F811
    """Run the command on the project's config, in this process; returns how it ended and what it wrote."""
    project.config["algorithm"] = {"kl": {"coefficient": 0.1}}
    project.save()

    def compare(*arguments: str):
        given = [f"model.path={tiny_model()}", "cluster.launcher=inline", f"--prompts={PROMPTS}", "--out=found"]
        done = CliRunner().invoke(main, ["parity", "grpo.yaml", *given, *arguments])
        path = project.root / "found" / "parity.json"
        return done, json.loads(path.read_text()) if path.exists() else None

    return compare


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_two_engines_on_the_same_weights_agree_at_any_temperature(compare, temperature):
    done, written = compare("--train", "torch", "--rollout", "torch", f"rollout.sampling.temperature={temperature}")
    assert done.exit_code == 0, done.output
    assert "passed: mean difference" in done.stdout
    assert "tokens by difference" in done.stdout
    found = written["found"]
    assert written["passed"]
    assert found["sequences"] == SAMPLES * PROMPTS
    assert found["tokens"] == sum(found["histogram"]) >= found["sequences"]
    assert 0 < found["max"] < 1e-4
    assert set(written["roles"]) == {"actor", "rollout"}  # the config's KL term needs no reference here
    assert not Path("runs").exists()


def test_another_model_and_dtype_are_compared_and_said_beside_what_is_published(compare):
    model = tiny_model("llama")
    done, written = compare("--model", model, "--dtype", "bfloat16", "--layers", "1")
    assert done.exit_code == 0, done.output
    assert written["model"] == f"{Path(model).name}, first 1 of 2 layers"
    assert (written["dtype"], written["tolerance"]) == ("bfloat16", 0.05)
    assert written["model"] in done.stdout
    assert "0.0015 to 0.003 nats" in done.stdout
    assert 1e-4 < written["found"]["mean"] < 0.05


def test_more_than_the_tolerance_is_a_failure_with_the_same_table(compare):
    done, written = compare("--tolerance", "1e-12")
    assert done.exit_code == 1, done.output
    assert "FAILED: mean difference" in done.stdout
    assert "more than 1e-12" in done.stdout
    assert written["passed"] is False


def test_an_engine_that_reports_other_logprobs_than_it_draws_by_fails(compare, monkeypatch):
    honest = TorchRolloutEngine.generate

    async def shifted(self, request):
        result = await honest(self, request)
        for completion in result.completions:
            object.__setattr__(completion, "logprobs", [value - 0.01 for value in completion.logprobs])
        return result

    monkeypatch.setattr(TorchRolloutEngine, "generate", shifted)
    done, written = compare()
    assert done.exit_code == 1, done.output
    assert written["found"]["mean"] == pytest.approx(0.01, rel=1e-3)


def test_a_run_that_is_already_there_is_left_alone(compare):
    run = Path("runs", "one")
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    done, _ = compare()
    assert done.exit_code == 0, done.output
    assert [path.name for path in run.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rollout", "torhc"], "Did you mean 'torch'"),
        (["--train", "torhc"], "actor.engine.backend"),
        (["--prompts", "0"], "--prompts"),
        (["--tolerance", "0"], "--tolerance"),
        (["rollout.samples_per_promt=2"], "Did you mean"),
        (["data.max_prompt_tokens=2"], "data.max_prompt_tokens"),
        (["--out", "train.jsonl"], "--out"),
        (["--out", "train.jsonl/below"], "cannot be created"),
    ],
    ids=str,
)
def test_a_mistake_is_named_and_nothing_is_written(compare, arguments, said):
    done, written = compare(*arguments)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert written is None


def test_its_help_says_the_exit_codes():
    said = " ".join(CliRunner().invoke(main, ["parity", "--help"]).output.split())
    assert "0 the mean difference is within the tolerance, 1 it is not" in said
