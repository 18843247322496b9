"""The packages on the pages for plugin authors, docs/plugins: their files, installed for a test."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from distributions import installed

PAGES = Path(__file__).parents[1] / "docs" / "plugins"
EXAMPLES = PAGES.parents[1] / "examples" / "engines"
EXAMPLE = re.compile(r"\]\(\.\./\.\./examples/engines/([\w/]+\.py)\)")
FILE = re.compile(r"^```\w+\n(# (?P<path>[\w./-]+\.(?:py|toml))\n.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    """What stands in the blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


class PagePackage:
    """The package of a page.

    Args:
        page: the page's name, without `.md`.

    Attributes:
        text: the page.
        examples: Text of each file in examples/engines that the page links to, by path.
        files: Text of each file of the package by path: blocks of the page that begin with a path, and its examples.
    """

    def __init__(self, page: str):
        self.text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
        self.examples = {path: (EXAMPLES / path).read_text(encoding="utf-8") for path in EXAMPLE.findall(self.text)}
        self.files = {found["path"]: found[1] for found in FILE.finditer(self.text)} | self.examples
        if "pyproject.toml" not in self.files:  # a page that shows it without its name
            self.files["pyproject.toml"] = blocks(self.text, "toml")[0]
        self.project = tomllib.loads(self.files["pyproject.toml"])["project"]
        ((self.plugin, self.module),) = self.project["entry-points"]["enginehouse"].items()
        self.package = self.module.partition(".")[0]

    def config(self, number: int = 0) -> dict:
        """A YAML block of the page."""
        return yaml.safe_load(blocks(self.text, "yaml")[number])

    def write(self, site: Path) -> None:
        """Put the package and its metadata into a folder that is on the path, as pip does."""
        for path, text in self.files.items():
            if path.endswith(".py"):
                (site / path).parent.mkdir(parents=True, exist_ok=True)
                (site / path).write_text(text)
        (site / self.package / "__init__.py").touch()
        installed(site, self.project["name"], {self.plugin: self.module}, version=self.project["version"])

    @contextmanager
    def installed(self, site: Path) -> Iterator[PagePackage]:
        """As `write`; its modules are forgotten afterwards."""
        self.write(site)
        try:
            yield self
        finally:
            for module in [name for name in sys.modules if name.partition(".")[0] == self.package]:
                del sys.modules[module]
