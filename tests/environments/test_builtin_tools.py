"""The tools that a config may name."""

import json
import math

import pytest

from enginehouse.errors import ConfigError
from enginehouse_environments.builtin_tools.calculator import calculator
from enginehouse_environments.builtin_tools.python import make_python
from enginehouse_environments.builtin_tools.search import make_search
from enginehouse_environments.functions import BUILT_IN, make_tools
from enginehouse_rewards import sandbox


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(7 // 2) ** 2 % 5", str(-((7 // 2) ** 2) % 5)),
        ("6 / 2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333333"),
        ("2 ** 100", str(2**100)),
        ("2 ** -1", "0.5"),
        ("max(1, 2, sqrt(16)) + abs(-1) + round(2.567, 1)", "7.6"),
        (" floor(pi) + ceil(e) ", "6"),
        ("log(e)", "1"),
        ("1e20", repr(1e20)),
        ("9007199254740993 + 0", "9007199254740993"),
    ],
)
def test_arithmetic(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "this is no expression"),
        ("2 +", "this is no expression: invalid syntax"),
        ("2 ^ 3", r"write \*\* for a power"),
        ("__import__('os')", "is not supported"),
        ("(1).real", "is not supported"),
        ("True + 1", "is not supported"),
        ("'a' * 9", "is not supported"),
        ("[1] * 9", "is not supported"),
        ("sqrt", "is not supported"),
        ("max(key=1)", "is not supported"),
        ("sqrt(1, 2)", "takes exactly one argument"),
        ("1 << 9", "is not supported"),
        ("9 ** 9 ** 9", "the number is too large"),
        ("(10 ** 2000) * (10 ** 2000)", "the number is too large"),
        ("round(5, -10 ** 9)", "the number of digits for round is too large"),
        ("10.0 ** 400", "no finite number"),
        ("1e308 * 10", "no finite number"),
        ("(-8) ** 0.5", "no real number"),
        ("sqrt(-1)", "math domain error"),
        ("(" * 400 + ")" * 400, "nested"),
        ("1" * 2000, "more than 1000 characters"),
    ],
)
def test_what_is_no_arithmetic_or_too_much_of_it_is_refused(expression, said):
    with pytest.raises(ValueError, match=said):
        calculator(expression)


def test_dividing_by_nothing_is_said_as_python_does():
    with pytest.raises(ZeroDivisionError):
        calculator("1 / 0")
    assert math.isclose(float(calculator("sin(1) ** 2 + cos(1) ** 2")), 1)


@pytest.fixture(scope="module")
def python():
    return make_python(seconds=20.0, isolation="best")


def test_a_program_returns_what_it_prints_and_its_last_value(python):
    assert python("import math\nprint(math.pi)\n2 + 3") == f"{math.pi}\n5\n"
    assert python("x = 1") == "(nothing was printed)"
    assert python("print('a')\nraise SystemExit(2)") == "a\n\n(the program was ended: exit code 2)"
    assert "é" in python("from __future__ import annotations\nprint('é')")


def test_what_a_program_raises_is_said_with_its_lines_alone(python):
    said = python("print(1)\ndef f():\n    return {}['k']\nf()\nprint(2)")
    assert said.startswith("1\nTraceback")
    assert [line.split(",")[1] for line in said.splitlines() if "File" in line] == [" line 4", " line 3"]
    assert said.endswith("KeyError: 'k'\n")
    assert "SyntaxError" in python("print(")


def test_a_program_is_ended_in_time_and_reaches_neither_files_nor_network(python):
    assert make_python(seconds=0.3, isolation="best")("while True: pass") == "(the program was ended: time)"
    if sandbox.missing():
        pytest.skip("this machine cannot restrict a program")
    assert "Error" in python("open('/etc/passwd').read()")
    assert "Error" in python("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)")


def test_a_machine_that_cannot_isolate_refuses_the_tool(monkeypatch):
    monkeypatch.setattr(sandbox, "missing", lambda: ("files",))
    with pytest.raises(ConfigError, match=r"tools: python: this machine cannot restrict files"):
        make_tools(["python"])
    make_tools([{"name": "python", "isolation": "best"}])


DOCUMENTS = [
    {"title": "Otters", "text": "The otter lives in rivers and eats fish."},
    {"text": "The fox lives in the forest."},
    {"title": None, "text": "Whales eat plankton, and live in the sea."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n\n", encoding="utf-8")
    return path


def test_the_documents_that_fit_best_are_found(corpus):
    search = make_search(str(corpus), 2)
    assert search("otter").startswith("Otters\nThe otter")
    assert search("fox forest") == DOCUMENTS[1]["text"]
    assert search("xyzzy") == search("") == "nothing was found"
    assert len(make_search(str(corpus), 9)("eat fish").split("\n\n")) == 2


def test_a_corpus_is_indexed_once_a_process_and_not_by_a_check(corpus):
    tools = [make_tools([{"name": "search", "corpus": str(corpus), "k": k}])[0] for k in (1, 2)]
    assert tools[0].prepare() is tools[1].prepare()


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "line 2 is no JSON"), ("{}", 'no object with a "text"'), ('{"text": "a", "title": 1}', "title")],
)
def test_a_line_that_is_no_document_is_named(corpus, line, said):
    corpus.write_text(json.dumps(DOCUMENTS[0]) + "\n" + line)
    (tool,) = make_tools([{"name": "search", "corpus": str(corpus)}])
    with pytest.raises(ConfigError, match=said):
        tool.prepare()


def test_an_empty_corpus_is_refused(corpus):
    corpus.write_text("\n")
    with pytest.raises(ConfigError, match="has no documents"):
        make_search(str(corpus))


def test_each_built_in_is_described_by_its_own_name(corpus):
    given = {"search": {"name": "search", "corpus": str(corpus)}, "python": {"name": "python", "isolation": "best"}}
    for name in BUILT_IN:
        (tool,) = make_tools([given.get(name, name)])
        assert tool.name == tool.schema["function"]["name"] == name
        assert len(tool.schema["function"]["parameters"]["properties"]) == 1
