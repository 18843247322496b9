"""The site: links lead to pages of it, it asks no other host for anything, and its search works from a file."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
from tools import pictures
from tools.site import MOVED, ROOT, TAKEN_IN, for_the_site

TITLE = (ROOT / "docs/data.md").read_text().partition("# ")[2].partition("\n")[0]
ON_SITE = {*TAKEN_IN, "data.md", "rewards.md", "decisions/rewards.md", "pictures/house.svg"}


@pytest.mark.parametrize(
    ("page", "there", "here"),
    [
        ("index.md", "[data](docs/data.md#chats)", "[data](data.md#chats)"),
        ("index.md", "[docs/data.md](docs/data.md)", f"[{TITLE}](data.md)"),
        ("index.md", "[a plugin](plugins/fsdp/README.md)", "[a plugin](backends/fsdp.md)"),
        ("index.md", "[examples/tutorial](examples/tutorial)", None),
        ("backends/fsdp.md", "[it](../../docs/data.md)", "[it](../data.md)"),
        ("backends/fsdp.md", "see docs/data.md, `docs/data.md`", f"see [{TITLE}](../data.md), `docs/data.md`"),
        (
            "data.md",
            "[the loop](../plugins/rl/src/enginehouse_rl/loop/loop.py)",
            "the loop (`plugins/rl/src/enginehouse_rl/loop/loop.py`)",
        ),
        ("data.md", "[rl/loop/loop.py](../plugins/rl/src/enginehouse_rl/loop/loop.py)", "rl/loop/loop.py"),
        ("data.md", "[`x`](rewards.md)", "[`x`](rewards.md)"),
        ("decisions/rewards.md", "[up](../rewards.md)", "[up](../rewards.md)"),
        ("data.md", "[nothing](../core/none.py)", "[nothing](../core/none.py)"),
        ("data.md", "[out](https://example.org/x.md) [up](#top)", "[out](https://example.org/x.md) [up](#top)"),
        ("data.md", "![](pictures/house.svg)", "![](pictures/house.svg)"),
        ("index.md", "```` ```bash ````\n[x](docs/data.md)\n```py\n```", "```` ```bash ````\n[x](data.md)\n```py\n```"),
        ("index.md", '<img src="docs/pictures/house.svg">', '<img src="pictures/house.svg">'),
        ("index.md", '<source srcset="docs/pictures/none.svg">', '<source srcset="docs/pictures/none.svg">'),
        ("data.md", '```bash not-run="why"\n[x](rewards.md)\n```', "```bash\n[x](rewards.md)\n```"),
    ],
)
def test_a_link_leads_to_where_its_target_is_on_the_site(page: str, there: str, here: str | None):
    shown = for_the_site(there, page, ON_SITE)
    assert shown == here or (here is None and shown.endswith("](tutorial.md)"))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_as_it_is_drawn(name: str):
    assert (pictures.FOLDER / name).read_text() == pictures.PICTURES[name]().svg(), "make pictures"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return site


@pytest.mark.slow
def test_every_page_is_built_and_none_asks_another_host(built: Path):
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} | {*TAKEN_IN, "cli.md"}
    assert {str(page.relative_to(built)) for page in built.rglob("*.html")} == {
        "404.html",
        *MOVED,
        *(re.sub(r"md$", "html", page) for page in pages),
    }
    for page in set(built.rglob("*.html")) - {built / "404.html"}:  # which is for a server
        links = re.findall(
            r'<(?:a|img|source)\b[^>]*\b(?:src|srcset|href)="(?!https?:|#|mailto:)([^"#?]+)', page.read_text()
        )
        assert not [link for link in links if not (page.parent / link).exists()], page
        asked = re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not asked, page
    assert "Usage:" in (built / "cli.html").read_text()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_search_works_without_a_server(built: Path):
    ended = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom",
         f"file://{built}/index.html?q=staleness"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.findall(r'<a href="[^"]*/([\w/-]+\.html)[^"]*"[^>]*class="md-search-result__link"', ended.stdout)
    assert "config.html" in found, ended.stderr
