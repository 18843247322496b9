"""Pages for users name recipes, advantages, losses, alarms and config keys that exist, and leave none of them out."""

import re
from pathlib import Path

import pytest

from enginehouse.plugin import Advantage, Loss, load_plugins
from enginehouse_recipes import recipes
from enginehouse_rl.benchmarks.names import BENCHMARKS
from enginehouse_rl.config.load import keys
from enginehouse_rl.config.schema import SCHEMAS, Config
from enginehouse_rl.loop.alarms import ALARMS
from enginehouse_rl.plan.resume import FIXED, FREE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["choosing.md", "evaluating.md", "no-learning.md", "operators.md", "resuming.md", "watching.md"]
SECTIONS = "|".join(Config.model_fields)
KEY = re.compile(rf"`((?:{SECTIONS})\.[\w.]+?)(?:[=:][^`]*)?`")
FILES = re.compile(r"\.(json|yaml|py|md)$")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def rows(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose header begins so."""
    table = read(page).split(f"\n| {header} ", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([\w/]+)`", cell))


@pytest.mark.parametrize("page", PAGES)
def test_each_config_key_on_a_page_exists(page: str):
    known = {
        ".".join(parts[:end]) for kind in SCHEMAS.values() for parts in keys(kind) for end in range(len(parts) + 1)
    }
    found = {key for key in KEY.findall(read(page)) if not FILES.search(key)}
    assert len(found) > 3
    checked = {re.split(r"\.(?:options|arguments)\.", key)[0] for key in found}
    assert {key for key in checked if key not in known} == set()


def test_what_there_is_to_choose_exists_and_each_advantage_is_there():
    manager = load_plugins(enabled=[])
    advantages, losses = ({each.record.name for each in manager.providers(kind)} for kind in (Advantage, Loss))
    table = rows("choosing.md", "I want")
    assert set().union(*(names(row[2].split(",")[0]) for row in table)) == advantages
    assert set().union(*(names(row[3].split(",")[0]) for row in table)) <= losses
    named = [cell for row in table for cell in names(row[1])]
    named += [cell for row in rows("choosing.md", "you have") for cell in names(row[1])]
    named += [cell for row in rows("../plugins/recipes/README.md", "recipe") for cell in names(row[0])]
    assert len(named) > 20
    assert set(named) <= recipes().keys()


def test_each_alarm_is_on_its_page():
    assert {name for row in rows("run-directory.md", "alarm") for name in names(row[0])} == {
        alarm.name for alarm in ALARMS
    }


def test_each_key_that_a_resumed_run_may_not_change_is_on_its_page():
    text = read("resuming.md")
    assert [key for key in (*FIXED, *FREE[:1]) if f"`{key}`" not in text] == []


def test_each_benchmark_is_on_its_page():
    assert set().union(*(names(row[0]) for row in rows("evaluating.md", "name"))) == {*BENCHMARKS, "aime"}


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_of_the_checkout(page: Path):
    targets = re.findall(
        r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    )
    assert [target for target in targets if ":" not in target and not (page.parent / target).exists()] == []
