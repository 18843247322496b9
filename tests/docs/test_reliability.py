"""docs/reliability.md says what the tests marked `fault` say."""

from __future__ import annotations

from reliability import PAGE, page


def test_the_page_of_faults_is_the_tests():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: make reliability"
