"""docs/glossary.md has at most twenty words, in order, so that it can be read at once."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_the_glossary_has_at_most_twenty_words_in_alphabetical_order():
    words = re.findall(r"^\| ([a-z ]+) \|", PAGE.read_text(encoding="utf-8"), re.M)[1:]
    assert 10 < len(words) <= 20
    assert words == sorted(words)
