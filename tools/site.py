"""Hooks of mkdocs: what the site has beside the pages in docs/.

- Pages that lie elsewhere in the checkout (README.md, those of the plugins and examples) are taken in; the one of the
  command line is made of the commands.
- A link to a file that is no page becomes text with the file's path.
- A page that moved leaves one that leads to its new address.
- The mark of a command block, which says what test runs it, is taken from its first line (tests/docs/test_commands.py).
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/README.md"))

TAKEN_IN = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "quickstart.md": "examples/quickstart/README.md",
    "tutorial.md": "examples/tutorial/README.md",
} | {
    f"backends/{path.parent.name}.md": f"plugins/{path.parent.name}/README.md"
    for path in ROOT.glob("plugins/*/README.md")
}
"""Places in the checkout of pages of the site that are not in docs/."""

MOVED = {"newcomers.html": "concepts.html", "contract.html": "contract/index.html"}
"""Pages of the site that went, and where what they held begins now."""

COMMAND_LINE = """\
# Command line

Made of the commands themselves; `enginehouse COMMAND --help` says the same.

::: mkdocs-click
    :module: enginehouse.cli.main
    :command: main
    :prog_name: enginehouse
    :depth: 1
    :style: plain
    :list_subcommands: true
"""

PAGE_NAME = re.compile(r"(?<![\w/(\[`])(?:docs/[\w/-]+|plugins/\w+/README)\.md\b")
"""A page named in running text, as in READMEs of plugins, whose links would lead nowhere on a package index."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
PICTURE = re.compile(r'\b(src|srcset)="([^":]+)"')
FENCE = re.compile(r"^( *```\w+) .*$", re.M)
BLOCK = re.compile(r"(^ *```(?!`).*?^ *```[ ]*$)", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in the pages that lie outside of docs/."""
    for page, source in TAKEN_IN.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "cli.md", content=COMMAND_LINE))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Lead the addresses of pages that moved to their new ones."""
    for old, new in MOVED.items():
        text = f'<!doctype html><meta http-equiv="refresh" content="0; url={new}"><a href="{new}">{new}</a>\n'
        Path(config.site_dir, old).write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets are on the site, and take the marks from command blocks."""
    return for_the_site(
        markdown, page.file.src_uri, {file.src_uri for file in files if not file.inclusion.is_excluded()}
    )


def for_the_site(markdown: str, page: str, on_site: set[str]) -> str:
    """The text of a page as the site shows it.

    Args:
        markdown: as it stands in the checkout.
        page: its path on the site.
        on_site: the paths of all files of the site.
    """
    parts = BLOCK.split(markdown)
    if page in TAKEN_IN:
        up = relpath(".", str(PurePosixPath(TAKEN_IN[page]).parent))
        parts[::2] = [PAGE_NAME.sub(lambda name: f"[{name[0]}]({up}/{name[0]})", text) for text in parts[::2]]
    parts[::2] = [LINK.sub(lambda found: _link(found, page, on_site), text) for text in parts[::2]]
    parts[::2] = [PICTURE.sub(lambda found: _picture(found, page, on_site), text) for text in parts[::2]]
    return FENCE.sub(r"\1", "".join(parts))


def _link(found: re.Match[str], page: str, on_site: set[str]) -> str:
    picture, words, target = found.groups()
    path, _, anchor = target.partition("#")
    if not path or ":" in path:
        return found[0]
    source = TAKEN_IN.get(page, f"docs/{page}")
    there = normpath(str(PurePosixPath(source).parent / path))
    if uri := _on_site(there, on_site):
        words = _title(uri) if re.fullmatch(r"[\w./-]+/[\w./-]+", words) else words  # a path says little there
        return f"{picture}[{words}]({relpath(uri, str(PurePosixPath(page).parent))}{'#' * bool(anchor)}{anchor})"
    if not (ROOT / there).exists() or picture:
        return found[0]  # mkdocs says that it leads nowhere
    return words if words.strip("`").endswith(PurePosixPath(there).name) else f"{words} (`{there}`)"


def _picture(found: re.Match[str], page: str, on_site: set[str]) -> str:
    """Return the attribute of a tag that names a picture, as the site's page needs it."""
    attribute, path = found.groups()
    there = normpath(str(PurePosixPath(TAKEN_IN.get(page, f"docs/{page}")).parent / path))
    uri = _on_site(there, on_site)
    return f'{attribute}="{relpath(uri, str(PurePosixPath(page).parent))}"' if uri else found[0]


def _title(uri: str) -> str:
    """The first heading of a page of the site."""
    text = (ROOT / TAKEN_IN.get(uri, f"docs/{uri}")).read_text(encoding="utf-8")
    return text.partition("# ")[2].partition("\n")[0]


def _on_site(path: str, on_site: set[str]) -> str | None:
    """Return the page or file of the site that is made of a path of the checkout."""
    pages = {source: page for page, source in TAKEN_IN.items()}
    for source in (path, f"{path}/README.md"):
        if source in pages:
            return pages[source]
    inside = path.removeprefix("docs/")
    return inside if path.startswith("docs/") and inside in on_site else None
