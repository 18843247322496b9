"""`python -m tools.wording`: docstrings that begin with a clause, entries that begin without a noun, the name `one`."""

from pathlib import Path

import pytest
from tools.wording import check_source, check_tree


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""What a step does."""', 1),
        ('def find():\n    """Whether it is there."""', 2),
        ('class Row:\n    """Rows.\n\n    Attributes:\n        size: of the row.\n    """', 2),
        ('def find(*rows):\n    """Find a row.\n\n    Args:\n        *rows: Of the file.\n    """', 2),
        ('def find(row):\n    """Find a row.\n\n    Args:\n        row: whether it is there.\n    """', 2),
        ('LIMIT = 3\n"""How many."""', 2),
        ("for one in rows:\n    pass", 1),
        ("rows = [size for row, one in sizes]", 1),
        ("def count(\n    one,\n): ...", 2),
        ("count = lambda one: 1", 1),
        ("if one := find():\n    pass", 1),
        ("import numpy as one", 1),
    ],
)
def test_the_line_of_what_needs_a_second_reading_is_named(source: str, line: int):
    assert [found for found, _ in check_source(source)] == [line]


@pytest.mark.parametrize(
    "source",
    [
        '"""Steps of a run."""',
        'def find():\n    """Return the row.\n\n    Args:\n        row: Row of the file.\n    """',
        'print("done")\n"""What is no docstring."""',
        "limit = 1\nrun(one=limit)",
    ],
)
def test_nouns_verbs_and_names_of_others_pass(source: str):
    assert list(check_source(source)) == []


def test_all_packages_and_tools_are_checked(tmp_path: Path):
    for package in ("core/src/enginehouse", "plugins/new/src/enginehouse_new", "tools", "tests"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "rows.py").write_text("one = 1\n")
    found = [line.partition(": ")[0] for line in check_tree(tmp_path)]
    assert found == ["core/src/enginehouse/rows.py:1", "plugins/new/src/enginehouse_new/rows.py:1", "tools/rows.py:1"]
