"""The loop of examples/loop, on other engines and as the page of the library grows it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .marked import Marked

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "examples" / "loop"
PAGES = ROOT / "docs" / "library"
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", (PAGES / "own-trainer.md").read_text(), re.M | re.S))

Run = Callable[..., str]

ENGINES = pytest.mark.sources("examples/loop/", "docs/library/", "core/src/enginehouse/library.py")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a program beside `grpo.py`, given arguments, and returns what it printed."""
    shutil.copytree(LOOP, tmp_path / "loop", ignore=shutil.ignore_patterns("__pycache__"))
    runtimes = {name: os.environ[name] for name in ("ENGINEHOUSE_RUNTIMES",) if name in os.environ}
    commands = Marked(tmp_path, runtimes)

    def run(program: str, *arguments: str) -> str:
        output = tmp_path / "output.txt"
        code = commands.run([sys.executable, Path("loop", program), *arguments], output, 540.0)
        assert code == 0, output.read_text()
        return output.read_text()

    yield run
    commands.kill()


def rewards(said: str) -> list[float]:
    """The mean reward of each step."""
    return [float(reward) for reward in re.findall(r"reward ([\d.]+)", said)]


def test_the_loop_is_a_page():
    assert len((LOOP / "grpo.py").read_text().splitlines()) <= 60


def test_what_is_shown_of_the_loop_stands_in_it():
    shown = re.findall(r"^```py\n(.*?)^```", (PAGES / "index.md").read_text(encoding="utf-8"), re.M | re.S)
    assert shown
    program = [line.strip() for line in (LOOP / "grpo.py").read_text().splitlines()]
    for block in shown:
        assert [line for line in map(str.strip, block.splitlines()) if line not in program] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@ENGINES
@pytest.mark.parametrize(
    ("program", "steps", "pattern"),
    [
        ("ppo.py", 3, r"error of values 0\.\d+"),
        ("ahead.py", 4, r"at most [01] versions old"),
        ("turns.py", 2, r"reward 0\.\d+"),
        ("mortal.py", 4, r"responses 256 "),
    ],
)
def test_the_page_of_your_own_trainer_runs(run: Run, tmp_path: Path, program: str, steps: int, pattern: str):
    subprocess.run([sys.executable, "-c", MAKE_MODEL], cwd=tmp_path, check=True)
    (tmp_path / "loop" / program).write_text(PROGRAMS[program])
    said = run(program, str(steps))
    assert len(re.findall(pattern, said)) == steps, said
    if program == "ahead.py":
        assert "at most 1 versions old" in said
    if program == "mortal.py":
        assert sum(map(int, re.findall(r"restarts (\d+)", said))) == 1


MAKE_MODEL = "import sys; sys.path.insert(0, 'loop'); import warm_up; warm_up.make_model('runs/loop/model')"


@pytest.mark.slow
@pytest.mark.timeout(900)
@ENGINES
def test_the_loop_learns_with_fsdp_and_vllm_by_two_words(run: Run, tmp_path: Path):
    program = tmp_path / "loop" / "grpo.py"
    actor, rollout = 'eh.Engine("torch", options)', 'eh.Engine("torch")'
    text = program.read_text()
    assert (text.count(actor), text.count(rollout)) == (1, 1)
    changed = text.replace(actor, actor.replace("torch", "fsdp")).replace(rollout, rollout.replace("torch", "vllm"))
    program.write_text(changed)
    run("warm_up.py")
    came = rewards(run("grpo.py", "200"))
    assert len(came) == 200
    assert sum(came[-5:]) / 5 >= 0.9, came
