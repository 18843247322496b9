"""The table of families in docs/models.md is what is seen: refused by `plan`, or trained, exported and loaded again."""

import re

import families
import pytest
from families import COLUMNS, FAMILIES, MOST_APART, PAGE


def shown(family: str) -> dict[str, str]:
    """What the page says of a family, by column."""
    (row,) = re.findall(rf"^\| {re.escape(family)} \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return dict(zip(COLUMNS, row.split(" | "), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)  # vLLM's start alone may take a minute, more on a busy machine
@pytest.mark.parametrize(
    "column", [pytest.param(one, marks=pytest.mark.exhaustive) if one.startswith("vllm") else one for one in COLUMNS]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_the_page_says(family, column):
    found, said = COLUMNS[column](family), shown(family)[column]
    if found.refused:
        assert f"{said[1:-1]}. {found.refused}" in PAGE.read_text().splitlines()
    else:
        assert said == found.agreement
        assert found.apart < MOST_APART or column.startswith("vllm")  # whose kernels are not ours to mend


def test_the_page_has_each_family_in_order():
    table = PAGE.read_text().partition("| family |")[2]
    assert re.findall(r"^\| (.+?) \|", table, re.MULTILINE) == list(FAMILIES)


def test_a_cell_that_is_apart_is_no_yes():
    cell, none = families.Cell(apart=0.5), families.Cell("it has no attention")
    said = families.page({"One": {name: none if name == "fsdp" else cell for name in COLUMNS}})
    assert "| One | 0.5 apart | [1] |" in said
    assert "1. it has no attention" in said
