"""`python -m tools.mutants`: each mutant's line is there once, and so is the test that has to find it."""

from pathlib import Path

import pytest
from tools.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_to_the_code_of_today(mutant: Mutant):
    text = (ROOT / mutant.file).read_text()
    changed = mutant.applied(text)
    assert changed != text
    compile(changed, mutant.file, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else Path(ROOT, file).exists()


def test_no_two_have_the_same_name_and_a_line_that_is_gone_is_an_error():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    with pytest.raises(ValueError, match="has its text 0 times"):
        MUTANTS[0].applied("")
