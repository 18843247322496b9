"""Hooks of mkdocs: what the site adds to the pages in docs/.

- It includes pages from elsewhere in the checkout (README.md, and pages of plugins and examples). The page of the
  command line is made of the commands.
- A link to a file that is no page becomes text with the file's path.
- A page at the old address of a moved page leads to the new address.
- The mark of a command block, which names the test that runs it (tests/docs/test_commands.py), is removed.
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
"""Places in the checkout of the site's pages that are not in docs/."""

MOVED = {"newcomers.html": "concepts.html", "contract.html": "contract/index.html"}
"""Old addresses of pages, and the page where their content begins now."""

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
"""Matches the name of a page in running text. READMEs of plugins have no links, which a package index would break."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
PICTURE = re.compile(r'\b(src|srcset)="([^":]+)"')
FENCE = re.compile(r"^( *```\w+) .*$", re.M)
BLOCK = re.compile(r"(^ *```(?!`).*?^ *```[ ]*$)", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Include the pages that are outside of docs/."""
    for page, source in TAKEN_IN.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "cli.md", content=COMMAND_LINE))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write pages that lead from old addresses to new ones."""
    for old, new in MOVED.items():
        text = f'<!doctype html><meta http-equiv="refresh" content="0; url={new}"><a href="{new}">{new}</a>\n'
        Path(config.site_dir, old).write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to their targets on the site, and remove the marks of command blocks."""
    return for_the_site(
        markdown, page.file.src_uri, {file.src_uri for file in files if not file.inclusion.is_excluded()}
    )


def for_the_site(markdown: str, page: str, on_site: set[str]) -> str:
    """Return the text of a page as the site shows it.

    Args:
        markdown: text in the checkout.
        page: path of the page on the site.
        on_site: paths of all files of the site.
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
        words = _title(uri) if re.fullmatch(r"[\w./-]+/[\w./-]+", words) else words  # a path means little there
        return f"{picture}[{words}]({relpath(uri, str(PurePosixPath(page).parent))}{'#' * bool(anchor)}{anchor})"
    if not (ROOT / there).exists() or picture:
        return found[0]  # mkdocs reports that it is dead
    return words if words.strip("`").endswith(PurePosixPath(there).name) else f"{words} (`{there}`)"


def _picture(found: re.Match[str], page: str, on_site: set[str]) -> str:
    """Return the attribute of a tag that names a picture, as the site's page needs it."""
    attribute, path = found.groups()
    there = normpath(str(PurePosixPath(TAKEN_IN.get(page, f"docs/{page}")).parent / path))
    uri = _on_site(there, on_site)
    return f'{attribute}="{relpath(uri, str(PurePosixPath(page).parent))}"' if uri else found[0]


def _title(uri: str) -> str:
    """Return the first heading of a page of the site."""
    text = (ROOT / TAKEN_IN.get(uri, f"docs/{uri}")).read_text(encoding="utf-8")
    return text.partition("# ")[2].partition("\n")[0]


def _on_site(path: str, on_site: set[str]) -> str | None:
    """Return the page or file of the site that is made from a path of the checkout."""
    pages = {source: page for page, source in TAKEN_IN.items()}
    for source in (path, f"{path}/README.md"):
        if source in pages:
            return pages[source]
    inside = path.removeprefix("docs/")
    return inside if path.startswith("docs/") and inside in on_site else None
