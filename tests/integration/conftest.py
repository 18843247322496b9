"""The quickstart in a directory of its own, made once, and the means to run it there."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock

from .run_process import RunFiles, RunProcess

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = Path("examples", "quickstart")

SMALL = (
    "model.path=examples/quickstart/work/model",  # random weights: for runs that have nothing to learn
    "data.validation=null",
    "train.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "cluster.threads_per_process=1",
)
"""Overrides of the quickstart's config that make a step as cheap as can be."""

SHORT = ("train.steps=30", "actor.engine.options.schedule=constant", "train.validate_every=0")
"""Of the quickstart's config: enough steps for the reward to rise well above the first one's."""

Start = Callable[..., RunProcess]


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the quickstart as shipped, its task made by its own script, and the modules of `project/`."""
    root = tmp_path_factory.mktemp("house")
    shutil.copytree(REPOSITORY / QUICKSTART, root / QUICKSTART, ignore=shutil.ignore_patterns("work", "__pycache__"))
    shutil.copytree(Path(__file__).parent / "project", root, dirs_exist_ok=True)
    subprocess.run([sys.executable, QUICKSTART / "make_task.py"], cwd=root, check=True)
    return root


@pytest.fixture(scope="session")
def start(house: Path) -> Iterator[Start]:
    """Starts `enginehouse COMMAND examples/quickstart/CONFIG OVERRIDES`; a run still there at the end is killed."""
    numbers = itertools.count()

    with ExitStack() as stack:

        def begin(
            command: str,
            *overrides: str,
            config: str | Path = QUICKSTART / "grpo.yaml",
            name: str = "",
            env: Mapping[str, str] | None = None,
        ) -> RunProcess:
            directory = Path("runs", name or f"run-{next(numbers)}")
            given = () if name else (f"run.directory={directory}",)
            arguments = (command, str(config), *overrides, *given)
            return stack.enter_context(
                RunProcess(*arguments, cwd=house, directory=house / directory, logs=house / "logs", env=env)
            )

        yield begin


@pytest.fixture(scope="session")
def warmed_up(start: Start, house: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """The quickstart's supervised run, at its end: what learns anything starts from its model.

    Where several tests run at a time, one of their processes makes it, and the others copy it.
    """

    def made() -> RunFiles:
        run = start("sft", config=QUICKSTART / "sft.yaml", name="quickstart-sft")
        run.finished()
        return run

    if "PYTEST_XDIST_WORKER" not in os.environ:
        return made()
    first = tmp_path_factory.getbasetemp().parent / "quickstart-sft"
    with FileLock(first.with_suffix(".lock")):
        if not first.exists():
            shutil.copytree(made().directory, first)
            return RunFiles(house / "runs" / "quickstart-sft")
    return RunFiles(shutil.copytree(first, house / "runs" / "quickstart-sft"))


@pytest.fixture(scope="session")
def train(start: Start) -> Start:
    """Starts a cheap run of the quickstart's config: `train(*overrides)`."""

    def begin(*overrides: str, env: Mapping[str, str] | None = None) -> RunProcess:
        return start("train", *SMALL, *overrides, env=env)

    return begin


def assert_rose(run: RunProcess) -> None:
    """A run with `SHORT` is at its end, and its reward rose."""
    ended = run.finished()
    assert ended.err == ""
    rewards = [line["reward/mean"] for line in run.metrics]
    assert len(rewards) == 30
    assert sum(rewards[:5]) / 5 < 0.1
    assert sum(rewards[-5:]) / 5 > 0.2, rewards
    assert run.record["status"] == "finished"


def installed(house: Path, name: str, source: str) -> Path:
    """Installs a plugin of one module into a directory of its own, to be put on a run's path."""
    site = house / f"site-{name}"
    info = site / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[enginehouse]\n{name.replace('_', '-')} = {name}\n")
    return site


@pytest.fixture(scope="session")
def faulty_transports(house: Path) -> dict[str, str]:
    """Installs the plugin of `project/faulty_transports.py`; returns the environment in which it is found."""
    module = house / "faulty_transports.py"
    site = installed(house, "faulty_transports", module.read_text())
    module.unlink()
    return {"PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY / "tests" / "core")])}


@pytest.fixture(scope="module")
def judge(house: Path) -> Path:
    """A sequence classifier with the quickstart model's body, as transformers writes one."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    body = house / QUICKSTART / "work" / "model"
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(body, num_labels=1, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(body)
    model.config.pad_token_id = tokenizer.pad_token_id or 0
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(house / "judge")
    tokenizer.save_pretrained(house / "judge")
    return house / "judge"
