"""The map of the code names files and names that exist, and can be read in one sitting."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
PAGES = [ROOT / "docs/architecture.md", ROOT / "CONTRIBUTING.md"]


def files_called(name: str) -> list[str]:
    """Return the tracked files that a path of the map may mean: `rl/plan/plan.py` is below enginehouse_rl."""
    path = re.sub(r"^(rl|rewards|recipes)/", r"enginehouse_\1/", name)
    return [file for file in FILES if f"/{file}".endswith(f"/{path}")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_file_and_name_on_the_map_exists(page: Path):
    text = page.read_text(encoding="utf-8")
    assert [path for path in re.findall(r"`([\w/.]+\.(?:py|js))`", text) if not files_called(path)] == []
    for name, path in re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", text):
        sources = [(ROOT / file).read_text(encoding="utf-8") for file in files_called(path)]
        assert any(re.search(rf"\b{name.split('.')[-1]}\b", source) for source in sources), (name, path)


def test_the_map_has_two_hundred_lines_at_most_and_ten_files_that_tell_the_story():
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    story = text.split("**Ten files tell the story.**")[1].split("\n\n")[0]
    assert len(re.findall(r"`[\w/]+\.py`", story)) == 10
