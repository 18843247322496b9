"""docs/worked-example.md: its commands run in the order of the page, and what it quotes of files is what is written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse_recipes import chat

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "worked-example.md").read_text(encoding="utf-8")
RUN = re.findall(r"^```bash run-by=[^\n]*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHORTLY = ("cluster.launcher=inline", "cluster.device=cpu")
SHORTER = {
    "train": ("train.steps=2", "train.prompts_per_step=2", *SHORTLY),
    "eval": ("evaluation.max_prompts=2", *SHORTLY),
}
"""What is said besides what the page says, so that it takes less time."""


@pytest.mark.slow
@pytest.mark.sources(
    "docs/worked-example.md",
    "plugins/recipes/src/enginehouse_recipes/",
    "plugins/recipes/src/enginehouse_recipes/init/",
)
def test_the_commands_of_the_page_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """init, pytest, plan, train, report, bottleneck, eval; from a model that has hardly seen a demonstration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "reward", raising=False)  # another example's, of an earlier test
    for name, count in {"ROWS": 64, "VALIDATION_ROWS": 4, "DEMONSTRATIONS": 100, "WALKS": 10}.items():
        monkeypatch.setattr(chat, name, count)
    (tmp_path / "arithmetic").mkdir()
    monkeypatch.chdir(tmp_path / "arithmetic")
    assert CliRunner().invoke(main, ["recipes", "run", "sft_chat", "train.steps=2", *SHORTLY]).exit_code == 0
    monkeypatch.chdir(tmp_path)
    done = []
    for line in "".join(RUN).splitlines():
        program, *words = shlex.split(line)
        if program == "cd":
            monkeypatch.chdir(words[0])
        elif program == "pytest":
            subprocess.run([sys.executable, "-m", "pytest", "-q", *words], check=True)
        else:
            ended = CliRunner().invoke(main, [*words, *SHORTER.get(words[0], ())])
            assert ended.exit_code == 0, ended.output
            done.append(words[0])
    assert done == ["init", "plan", "train", "report", "bottleneck", "eval"]
    assert Path("runs/first/report.html").stat().st_size > 10_000
    reward = Path("reward.py").read_text()
    assert reward.partition("\n\n")[2].strip() in PAGE
    config = Path("config.yaml").read_text()
    for quoted in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        left = iter(config.splitlines())
        assert all(line in left for line in quoted.splitlines()), quoted
    assert "samples_per_prompt: 8" in config
    sys.modules.pop("reward", None)
