"""`enginehouse keys`: what a config may hold."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse.plugin.options_schema import describe_options
from enginehouse_rl.config.schema import SCHEMAS, Config

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def said(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["keys", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_it_lists_every_key_with_type_default_and_purpose():
    text = said()
    (line,) = [line for line in text.splitlines() if line.startswith("rollout.sampling.top_p")]
    assert line.split()[1:8] == ["number,", ">", "0,", "<=", "1", "1.0", "Probability"]
    (line,) = [line for line in text.splitlines() if line.startswith("model.trust_remote_code")]
    assert line.split()[1:4] == ["boolean", "false", "Run"]
    assert all(f"{option.name} " in text for option in describe_options(Config))
    assert "evaluation.engine.backend" in text


def test_it_lists_those_of_a_part_and_of_supervised_runs():
    names = [line.split()[0] for line in said("algorithm.kl").splitlines() if not line.startswith(" ")]
    assert names == [
        "key",
        "algorithm",
        *(f"algorithm.kl.{name}" for name in ("coefficient", "estimator", "place", "target")),
    ]
    assert "train.rows_per_step" in said("--sft", "train")
    assert "algorithm.beta" in said("--dpo", "algorithm")
    assert "data.margin" in said("--rm", "data")


def test_a_part_that_is_not_there_is_answered_with_the_nearest():
    assert "no key begins with 'rollout.samplin'. Did you mean 'rollout.sampling'?" in said("rollout.samplin", code=2)


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_every_key_says_what_it_is_for(schema):
    assert [option.name for option in describe_options(schema) if not option.description] == []


def test_the_page_in_the_repository_is_what_the_command_writes():
    assert PAGE.read_text() == said("--markdown"), "write it anew: enginehouse keys --markdown > docs/config.md"
