"""Each chapter of the tutorial runs from top to bottom as a plain program, prints its numbers, and is a notebook."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .marked import Marked
from .run_process import until

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
CHAPTERS = sorted(TUTORIAL.glob("chapter_*.py"))
PATIENCE_SECONDS = 540.0
AFTERMATH_SECONDS = 30.0

# What chapter 5 calls of Megatron's plugin is promised to nobody: nothing else sees it change.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.sources("examples/tutorial/", "plugins/megatron/src/", "core/src/enginehouse/controller/"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Runs a chapter in a process of its own, once, and returns what it printed."""
    directory = tmp_path_factory.mktemp("tutorial")
    ended: dict[Path, tuple[int, str]] = {}
    commands = Marked(directory)

    def run(chapter: Path) -> str:
        if chapter not in ended:
            output = directory / f"{chapter.stem}.txt"
            code = commands.run([sys.executable, chapter], output, PATIENCE_SECONDS)
            ended[chapter] = code, output.read_text()
            until(lambda: not commands.processes(), f"{chapter.stem} to leave nothing", AFTERMATH_SECONDS, alive=_alive)
        code, text = ended[chapter]
        assert code == 0, text
        return text

    yield run
    commands.kill()


def _alive() -> None:
    """What is waited for is the end itself."""


def chapter(number: int) -> Path:
    (found,) = TUTORIAL.glob(f"chapter_{number}_*.py")
    return found


def test_there_are_five_chapters_and_the_readme_links_them_all():
    assert [path.name[:9] for path in CHAPTERS] == [f"chapter_{number}" for number in (1, 2, 3, 4, 5)]
    readme = (TUTORIAL / "README.md").read_text()
    assert all(f"({path.name})" in readme for path in CHAPTERS)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_a_notebook_of_text_and_code(path: Path):
    import jupytext
    import nbformat

    notebook = jupytext.read(path)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown"
    assert notebook.cells[0].source.startswith(f"# Chapter {path.name[8]}")
    assert kinds.count("code") >= 5
    assert kinds.count("markdown") >= 5
    assert notebook.metadata.kernelspec.language == "python"


@pytest.mark.slow
def test_chapter_1_gets_results_from_tasks_and_actors(said):
    text = said(chapter(1))
    assert "[0, 1, 4, 9, 16]" in text
    assert "before: 0\nafter:  10\n" in text
    assert text.count("32 MB, writable: False") == 3
    assert "3*3 + 4*4 = 25" in text


@pytest.mark.slow
def test_chapter_2_adds_up_on_two_pools_and_on_both_together(said):
    text = said(chapter(2))
    numbers = ["[1, 2, 3, 4]", "[2, 3, 4, 5]", "[3, 4, 5, 6, 7, 8, 9, 10]"]
    assert re.findall(r"^\[.*\]$", text, re.MULTILINE) == numbers
    assert "each has its own processes: True" in text
    assert "same processes: True" in text
    assert "the actor:      [50, 51, 52, 53]\nthe reference:  [0, 1, 2, 3]\n" in text
    assert "first: rank 2 died in 'add'" in text
    assert "again:  [1, 2, 3, 4]" in text


@pytest.mark.slow
def test_chapter_3_deals_pairs_in_place_and_by_a_plugin(said):
    text = said(chapter(3))
    assert text.startswith("[10, 11, 12, 13]\n10\n")
    assert "two to all:    [8, 10, 8, 10]" in text
    assert "by the plugin's mode: [8, 10, 8, 10]" in text
    assert "on rank zero:  5" in text


@pytest.mark.slow
def test_chapter_3_passes_rows_from_group_to_group(said):
    text = said(chapter(3))
    assert "DistributedBatch of 7 rows in 4 shard(s)" in text
    assert "rewards: [2.0, 6.0, 12.0, 20.0, 30.0, 42.0, 56.0]" in text
    assert "rewards through a future: [2.0, 6.0, 12.0, 20.0, 30.0, 42.0, 56.0]" in text
    assert "cut by tokens:  [28, 28]" in text
    assert "same rewards in the same order: True" in text


@pytest.mark.slow
def test_chapter_4_computes_what_the_whole_layer_computes(said):
    text = said(chapter(4))
    differences = re.findall(r"largest difference from the whole layer: (\S+)", text)
    assert len(differences) == 2
    assert all(float(difference) < 1e-5 for difference in differences)
    assert text.count("rows [0, 1, 2, 3, 4, 5]") == 4, "every rank of one replica sees all rows"
    assert text.count("rows [0, 1, 2]\n") == text.count("rows [3, 4, 5]\n") == 2, "two replicas share them"


@pytest.mark.slow
def test_chapter_5_computes_with_megatron_what_the_whole_layers_compute(said):
    text = said(chapter(5))
    sizes = ["4 ranks: tp 2, pp 1, dp 2, cp 1", "4 ranks: tp 2, pp 2, dp 1, cp 1"]
    assert re.findall(r"^\d ranks: .*$", text, re.MULTILINE) == sizes
    assert text.count("264192 parameters: linear_fc1.weight (688, 256), linear_fc2.weight (256, 344)") == 4
    differences = re.findall(r"largest difference from (?:the|both) whole layers?: (\S+)", text)
    assert len(differences) == 3
    assert all(float(difference) < 1e-5 for difference in differences)
    assert "must have 2 entries, one for each data-parallel rank, not 1" in text
    assert "Warning" not in text, "Megatron-core is kept quiet"
