"""Pages that tests write say what the markers of these tests say."""

import pytest
from tools.reliability import PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_the_page_says_what_the_tests_say(page):
    assert page.path.read_text(encoding="utf-8") == page.text(), "write it anew: make reliability"
