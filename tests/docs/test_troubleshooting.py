"""docs/troubleshooting.md quotes what the program says: each message's fixed parts are in the sources."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MESSAGES = re.findall(r"^### (.+)$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
OF_OTHERS = {"InvalidAuthToken"}
"""What Ray says."""


def texts(source: str) -> set[str]:
    """Each string of a source, as it reads with a gap for each value in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.fixture(scope="module")
def said() -> str:
    sources = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    return "\0".join(text for path in sources for text in texts(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("message", [message for message in MESSAGES if message not in OF_OTHERS])
def test_a_message_on_the_page_is_one_of_the_programs(said: str, message: str):
    parts = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
    assert parts
    between = "[^\0]{0,400}?".join(map(re.escape, parts))
    assert re.search(between, said), f"no source says {message!r}"


def test_the_page_is_read():
    assert len(MESSAGES) > 20
