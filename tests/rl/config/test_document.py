"""YAML as configs use it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.errors import ConfigError
from enginehouse_rl.config.document import dump, parse

words = st.text(max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("010", 10),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("~", None),
        ("", None),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object):
    read, _ = parse(f"key: {text}", "here")
    assert read == {"key": value}
    assert type(read["key"]) is type(value)


@given(documents)
@settings(max_examples=80, deadline=None)
def test_what_is_written_reads_back_equal(document: object):
    assert parse(dump(document), "here")[0] == document


@pytest.mark.parametrize(
    "text", ["1e-5", "yes", "null", "010", "on", "2026-01-01", "12:30", "1_0", "~", "=", "<<", " a"]
)
def test_a_string_that_looks_like_something_else_stays_a_string(text: str):
    assert parse(dump({"a": text, "b": [text], text: 1}), "here")[0] == {"a": text, "b": [text], text: 1}


def test_lines_of_keys_are_known():
    _, lines = parse("a: 1\nb:\n  c: 2\n  d: [3,\n    4]\n", "here")
    assert (lines["a",], lines["b",], lines["b", "c"], lines["b", "d", "1"]) == (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "here, line 2, is not valid YAML: the key 'a' occurs twice, first in line 1"),
        ("a:\n  b: [1\nc: 2\n", "here, line 3"),
        ("a:\n\tb: 1\n", "here, line 2"),
        ("a: !!python/object/apply:os.getcwd []\n", "here, line 1"),
        ("a: 1\n---\nb: 2\n", "here, line 2"),
        ("a: \0\n", "here is not valid YAML"),
    ],
)
def test_malformed_yaml_is_refused_with_its_line(text: str, said: str):
    with pytest.raises(ConfigError) as caught:
        parse(text, "here")
    assert said in str(caught.value)


def test_anchors_and_merge_keys_work():
    assert parse("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\n", "here")[0]["y"] == {"a": 1, "b": 3}
