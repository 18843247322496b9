"""Write core/README.md, the page that a package index shows, from README.md.

A package index has neither the files of the checkout nor a clone. Links therefore become plain text. The picture is
dropped, and so is every paragraph about a clone, with the block or list that it introduces.

python -m tools.index_page        # writes core/README.md
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "core" / "README.md"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")
PART = re.compile(r"```.*?^```|<picture>.*?</picture>|[^\n]+(?:\n[^\n]+)*", re.MULTILINE | re.DOTALL)


def index_page(readme: str) -> str:
    """Return the page of a package index, made from the text of README.md."""
    parts: list[str] = []
    introduced = False
    for part in PART.findall(readme):
        if introduced or part.startswith("<picture>"):
            introduced = False
        elif "clone" in part:
            introduced = part.endswith(":")
        else:
            parts.append(LINK.sub(r"\1", part))
    sections = [
        part
        for part, following in zip(parts, [*parts[1:], "## "])
        if not (part.startswith("## ") and following.startswith("## "))
    ]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(index_page((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
