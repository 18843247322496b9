"""`python -m tools.stamps`: which figures are of code that has changed since."""

import json
import subprocess
from pathlib import Path

import pytest
from tools.stamps import MEASURES, ROOT, stale


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with figures of two benchmarks, each of the commit that is there."""
    for name in ("plugins/rl/src/enginehouse_rl/loop/loop.py", "core/src/enginehouse/weights/sync.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("first = 1\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    for name in ("benchmarks/results/grpo.json", "benchmarks/results/transports.json", "docs/compatibility.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        stamp = {"commit": git(tmp_path, "rev-parse", "HEAD"), "written": "2026-11-27T08:00:00Z"}
        (tmp_path / name).write_text(json.dumps(stamp))
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "as it is")


def test_a_figure_is_named_once_the_code_that_it_measures_has_changed(checkout: Path):
    assert list(stale(checkout)) == []
    (checkout / "plugins/rl/src/enginehouse_rl/loop/loop.py").write_text("second = 2\n")
    commit(checkout)
    (line,) = stale(checkout)
    assert line.startswith("benchmarks/results/grpo.json is of ")
    assert line.endswith(", 2026-11-27: 1 files of what it measures have changed since")
    (checkout / "docs/compatibility.json").write_text("{}")
    assert next(stale(checkout)) == "docs/compatibility.json does not say which commit it is of"


def test_a_commit_that_is_not_there_says_nothing(checkout: Path):
    (checkout / "docs/compatibility.json").write_text(json.dumps({"commit": "0" * 40}))
    assert list(stale(checkout)) == []


def test_every_figure_says_its_commit_and_its_date_first():
    for path in (ROOT / "docs/compatibility.json", *ROOT.glob("benchmarks/results/*.json")):
        assert list(json.loads(path.read_text()))[:2] == ["commit", "written"], path
    assert all((ROOT / name).is_file() for name in MEASURES)
