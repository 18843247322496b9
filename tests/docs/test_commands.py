"""Every block of commands in the docs says which test runs it, or why none does; and what it calls exists.

The mark stands behind the language: ```bash run (the page's own test runs it), ```bash run-by="tests/...::test_name",
or ```bash not-run="why". A block that is no program is `text`.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from enginehouse.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        page
        for where in ("core/*.md", "docs/**/*.md", "examples/*/*.md", "plugins/*/*.md")
        for page in ROOT.glob(where)
    ),
]
MARK = re.compile(r'bash (run(?: ray\[default\])?|run-by="(?P<test>[^"]+)"|not-run="(?P<why>[^"]+)")')
RUN_AS_THEY_STAND = {
    "docs/operators.md": "tests/integration/test_cluster_page.py",
    "docs/plugins/quickstart.md": "tests/integration/test_third_party.py",
}
"""Pages whose blocks `run` a test takes from the page itself."""


class Block(NamedTuple):
    """A fenced block: its page, the line behind the fence, and what is in it."""

    page: str
    info: str
    text: str


def blocks(text: str, page: str) -> list[Block]:
    found = re.finditer(r"^(?P<fence> *```)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", text, re.M | re.S)
    return [Block(page, one["info"], one["text"]) for one in found]


BLOCKS = [block for page in PAGES for block in blocks(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))]
COMMANDS = [block for block in BLOCKS if block.info.split(" ")[0] in ("bash", "sh", "shell", "console")]


def wrong_with(block: Block) -> str | None:
    """What is wrong with a block's mark; None if nothing is."""
    language = block.info.partition(" ")[0]
    if not language:
        return "it has no language: `text` if it is no program"
    if language not in ("bash", "sh", "shell", "console"):
        return None
    if not (mark := MARK.fullmatch(block.info)):
        return 'commands are marked: bash run, bash run-by="tests/...::test_name" or bash not-run="why"'
    if mark[1].startswith("run-by"):
        file, _, test = mark["test"].partition("::")
        if not test:
            return "it names a file: name the test in it, FILE::TEST"
        if not (ROOT / file).is_file() or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8"):
            return f"there is no test {mark['test']}"
        said = "".join(
            one.read_text(encoding="utf-8") for one in {ROOT / file, *(ROOT / file).parent.glob("conftest.py")}
        )
        if unsaid := [verb for verb in verbs(block.text) if not re.search(rf"\b{verb}\b", said)]:
            return f"{file} does not say {', '.join(unsaid)}, so that it does not run that"
    elif mark["why"] is None and block.page not in RUN_AS_THEY_STAND:
        return "no test runs the blocks of this page as they stand"
    return None


def verbs(text: str) -> list[str]:
    """The word by which each line of pip, build and enginehouse does something; a test that runs it says the word."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for one in re.findall(
            r"(?:^|&& )\s*(pip \w+|python -m build|enginehouse [a-z]+(?: [a-z]+\b(?![=./-]))?)", line
        ):
            words = one.split()
            group = main.commands.get(words[1]) if words[0] == "enginehouse" else None
            found.append(words[1] if group and not isinstance(group, click.Group) else words[-1])
    return found


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_each_block_says_what_runs_it(page: str):
    wrong = {block.text: why for block in BLOCKS if block.page == page and (why := wrong_with(block))}
    assert not wrong, "\n".join(f"{why}:\n{text}" for text, why in wrong.items())


@pytest.mark.parametrize(
    ("info", "page"),
    [
        ("", "a.md"), ("bash", "a.md"), ("bash run", "a.md"), ('bash not-run=""', "a.md"), ("console", "a.md"),
        ('bash run-by="tests/docs/test_commands.py::test_nothing"', "a.md"),
        ('bash run-by="tests/none.py::test_none"', "a.md"),
    ],
)  # fmt: skip
def test_a_mark_that_says_nothing_true_is_found(info: str, page: str):
    assert wrong_with(Block(page, info, "ls\n"))


QUICKSTART = 'bash run-by="tests/integration/test_quickstart.py::test_the_quickstart_learns"'


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ('bash run-by="tests/integration/test_third_party.py"', "enginehouse plugins list\n"),
        (QUICKSTART, "enginehouse plugins show torch\n"),
        (QUICKSTART, 'pip install ".[torch]"\n'),
        (QUICKSTART, "ls && python -m build\n"),
    ],
)
def test_a_command_that_the_named_test_does_not_run_is_found(info: str, text: str):
    assert wrong_with(Block("a.md", info, text))
    assert wrong_with(Block("a.md", QUICKSTART, "enginehouse train examples/quickstart/grpo.yaml\n")) is None


def calls(text: str) -> list[list[str]]:
    """The words of each call of `enginehouse` in a block."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"\s*enginehouse ", line)]


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words name, and what is left of them."""
    command: click.Command = main
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize(
    "words", [words for block in COMMANDS for words in calls(block.text)], ids=lambda words: " ".join(words)[:50]
)
def test_a_command_in_the_docs_exists_with_its_options(words: list[str]):
    command, left = resolve(words)
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    assert {word.partition("=")[0] for word in left if re.match(r"--?[a-z]", word)} <= known


def test_the_docs_are_read():
    assert len(COMMANDS) > 25
    assert sum(len(calls(block.text)) for block in COMMANDS) > 25
