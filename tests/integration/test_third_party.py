"""Plugins of somebody else's as wheels in a clean environment: docs/plugins/quickstart.md, examples/third_party."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .marked import Marked

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plugins" / "quickstart.md"
THIRD_PARTY = ROOT / "examples" / "third_party"
OURS = [
    ROOT / "core",
    *(ROOT / "plugins" / name for name in ("rewards", "rl", "recipes", "transports", "torch", "testing")),
]
PATIENCE_SECONDS = 900.0

BLOCKS = re.findall(r"^```(\w+) (\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
"""Language, word beside it, and text of the page's blocks that have a word: `run`, `printed` or a file's name."""
INSTALLING = BLOCKS[0]
"""Makes the environment."""


class Clean:
    """An empty folder where commands run as in a new shell, with pip taking our packages from wheels."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.wheels = folder / "wheels"
        (folder / "home").mkdir()
        links = [*os.environ.get("PIP_FIND_LINKS", "").split(), str(self.wheels)]
        # What a cache holds is not loaded anew; nothing else of this user's is seen.
        cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True).stdout
        self.commands = Marked(
            folder,
            {
                "HOME": str(folder / "home"),
                "ENGINEHOUSE_RUNTIMES": str(folder / "runtimes"),
                "OMP_NUM_THREADS": "1",
                "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin",
                "PIP_CACHE_DIR": cache.strip(),
                "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
                "PIP_FIND_LINKS": " ".join(links),
                "PIP_QUIET": "1",
                "RAY_TMPDIR": str(folder),
            },
        )

    def run(self, *lines: str) -> str:
        """Run lines of bash with the environment, where there is one, active; returns what they said."""
        activate = f"[ ! -f {self.folder}/.venv/bin/activate ] || source {self.folder}/.venv/bin/activate"
        script, said = self.folder / "script.sh", self.folder / "said.txt"
        script.write_text("\n".join(["set -euo pipefail", activate, *lines]))
        code = self.commands.run(["bash", str(script)], said, PATIENCE_SECONDS)
        text = said.read_text()
        assert code == 0, f"{lines}\nended with {code}:\n{text}"
        return text

    def rewards(self, run: str) -> list[float]:
        """The mean reward of each step of a run."""
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["reward/mean"] for line in lines]


@pytest.fixture(scope="module")
def clean() -> Iterator[Clean]:
    """The page's environment: core, the torch engines and the suites, from wheels."""
    folder = Path(tempfile.mkdtemp(prefix="eh-", dir="/tmp"))  # Ray's sockets want a short path
    made = Clean(folder)
    try:
        wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(made.wheels)]
        packages = [*OURS, *(path.parent for path in THIRD_PARTY.glob("*/pyproject.toml"))]
        subprocess.run([*wheel, *map(str, packages)], check=True)
        made.run(INSTALLING[2])
        yield made
    finally:
        made.commands.kill()
        shutil.rmtree(folder, ignore_errors=True)


def printed(expected: str, said: str) -> list[str]:
    """The lines that were not printed; `...` stands for anything."""
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in expected.splitlines()]
    return [one for one in patterns if not re.search(one, said)]


@pytest.mark.slow
@pytest.mark.sources("docs/plugins/quickstart.md")
@pytest.mark.timeout(1800)
def test_the_page_runs_from_top_to_bottom(clean: Clean):
    said = ""
    for language, word, text in BLOCKS[1:]:
        if word == "run":
            said = clean.run(text)
        elif word == "printed":
            assert printed(text, said) == [], said
        else:
            assert (clean.folder / word).is_file(), "a block takes the place of a file that the template made"
            (clean.folder / word).write_text(text)
        assert language in ("bash", "text", "python")
    for run in ("runs/engine", "runs/ideas"):
        rewards = clean.rewards(run)
        assert sum(rewards[:3]) / 3 < 0.1
        assert sum(rewards[-3:]) / 3 > 0.35
    certificate = json.loads((clean.folder / "certificates" / "certificate.json").read_text())
    assert certificate["passed"] is True


@pytest.mark.slow
@pytest.mark.sources("examples/third_party/")
@pytest.mark.timeout(1800)
def test_packages_of_a_third_party_are_used_by_config_alone_and_certified(clean: Clean):
    clean.run(
        "pip install acme-rollout acme-train acme-algorithm", "enginehouse runtime create acme_rollout --variant cpu"
    )
    listed = clean.run("enginehouse plugins list")
    assert len(re.findall(r"^acme_(?:train|rollout) .* acme-", listed, re.M)) == 2  # narrow: in two tables
    assert "broken" not in listed
    clean.run(
        "enginehouse recipes run dr_grpo actor.engine.backend=acme_train rollout.engine.backend=acme_rollout "
        "algorithm.advantage.name=acme_algorithm 'algorithm.advantage.arguments={}' "
        "algorithm.loss.name=acme_algorithm 'algorithm.loss.arguments={clip: 0.5}' "
        "'run.trackers=[{name: acme_algorithm}]' environment.name=acme_algorithm train.steps=40 run.directory=runs/acme"
    )
    rewards = clean.rewards("runs/acme")
    assert sum(rewards[-3:]) / 3 > 0.35
    tracked = (clean.folder / "runs/acme/acme.csv").read_text()
    assert f"train,40,reward/mean,{rewards[-1]}" in tracked
    roles = json.loads((clean.folder / "runs/acme/run.json").read_text())
    assert "4.57.6" in json.dumps(roles)
    clean.run(
        "enginehouse certify acme_rollout --out certificates/rollout",
        "enginehouse certify acme_train --out certificates/train --quick",
        f"pytest -q {THIRD_PARTY}/acme_algorithm/tests",
    )
    certificate = json.loads((clean.folder / "certificates/rollout/certificate.json").read_text())
    assert certificate["passed"] is True
    assert "4.57.6" in json.dumps(certificate)
