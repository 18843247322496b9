"""docs/plugins: each page's package is installed as its pyproject.toml says, found whole, and does what it should."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributions import Distributions
from plugin_pages import PAGES, PagePackage, blocks
from projects import Project

import enginehouse_testing
from enginehouse.data import Batch
from enginehouse.engines.declared import find_faults
from enginehouse.errors import ConfigError
from enginehouse.plugin import PluginManager, RolloutBackend, load_plugins, process, resolve
from enginehouse.runtimes import choose_runtime
from enginehouse.runtimes.errors import NoRuntime
from enginehouse.runtimes.ingredients import make_recipe
from enginehouse_rewards.pool import RewardPool
from enginehouse_rl.config.load import load_config
from enginehouse_rl.plan.plan import plan

COMMAND = Path(sys.executable).with_name("enginehouse")
ALL = {path.stem for path in PAGES.glob("*.md")}
WITH_PACKAGE = sorted(ALL - {"index", "bad-plugins", "environment", "quickstart", "tracker"})
"""Pages of a whole package. The others have tests of their own."""
BATCH = Batch({"reward": torch.tensor([1.0, 0.0, 0.2, 3.0]), "group": torch.tensor([0, 0, 0, 1])})


@pytest.fixture
def package(request: pytest.FixtureRequest, distributions: Distributions) -> Iterator[PagePackage]:
    """The package of the page that the test names."""
    with PagePackage(request.param).installed(distributions.site) as package:
        yield package


def of(page: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("package", [page], indirect=True)


def loaded(package: PagePackage) -> PluginManager:
    return load_plugins(enabled=[package.plugin, "torch"], strict=True)


@pytest.mark.parametrize("package", WITH_PACKAGE, indirect=True)
def test_the_package_of_a_page_is_found_and_all_that_it_names_is_there(package: PagePackage):
    manager = loaded(package)
    (plugin,) = [one for one in manager.plugins if one.name == package.plugin]
    assert (plugin.status, plugin.problem, plugin.note) == ("ok", "", "")
    assert plugin.records or plugin.hooks
    for record in plugin.records:
        assert list(find_faults(record)) == []


def test_each_page_is_in_the_table_of_pages():
    linked = set(re.findall(r"^\|.*\]\(([\w-]+)\.md\) \|", (PAGES / "index.md").read_text(), re.MULTILINE))
    assert {*WITH_PACKAGE, "environment", "tracker"} <= linked


@of("advantage")
def test_the_advantage_is_planned_and_computes_what_its_page_says(package: PagePackage, project: Project):
    project.config |= package.config()
    path, manager = project.save(), loaded(package)
    assert plan(load_config(path, ()), manager, path).advantage_needs == ("reward", "group")
    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.arguments\.bound"):
        plan(load_config(path, ("algorithm.advantage.arguments.bound=-1",)), manager, path)
    found = manager.function("advantage", "my_median")(BATCH, bound=0.5)["advantages"]
    assert found.tolist() == pytest.approx([0.5, -0.2, 0.0, 0.0])


@of("reward")
def test_the_reward_is_planned_and_scores(package: PagePackage, project: Project, distributions: Distributions):
    project.config |= package.config()
    path, manager = project.save(), loaded(package)
    with pytest.raises(ConfigError, match=r"column is 'words'; the data has .*answer"):
        plan(load_config(path, ()), manager, path)
    project.write_rows("train.jsonl", [{"prompt": "1+1=", "words": ["two"]}] * 40)
    plan(load_config(path, ()), manager, path)
    pool = RewardPool(
        "my_reward.words:words",
        arguments=package.config()["reward"]["arguments"],
        python_path=[str(distributions.site)],
    )
    try:
        row = {"prompt": "?", "response": "one two", "words": ["two", "one"]}
        first, second = pool.score([row, {**row, "words": ["two", "six"]}])
    finally:
        pool.close()
    assert (first.reward, second.reward, second.figures) == (1.5, 0.5, {"share": 0.5})


@of("observer")
def test_the_observer_writes_what_it_is_told(package: PagePackage, tmp_path: Path):
    manager = loaded(package)
    run = SimpleNamespace(
        run_directory=SimpleNamespace(path=tmp_path), run_step=lambda step: {"reward/mean": 0.25 * step}
    )
    metrics = manager.run_step(run, 2)
    assert metrics["diary/seconds"] >= 0
    manager.observe("step_finished", run=run, step=2, metrics=metrics)
    manager.observe("checkpoint_saved", run=run, step=2, path="there", what="state")
    manager.observe("run_finished", run=run, outcome="finished")
    said = ["step 2: reward 0.50", "step 2: state in there", "finished"]
    assert (tmp_path / "diary.txt").read_text().splitlines() == said


@of("publishing")
def test_the_published_advantage_computes_and_its_name_may_be_told_from_others(package: PagePackage):
    function = loaded(package).function("advantage", "enginehouse-median:median")
    assert function(BATCH)["advantages"].tolist() == pytest.approx([0.8, -0.2, 0.0, 0.0])


@of("runtime")
def test_the_runtime_is_made_of_what_the_record_says_and_asked_for_by_name(package, monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINEHOUSE_RUNTIMES", str(tmp_path))
    record = loaded(package).get(RolloutBackend, "my_pinned", elsewhere=True)
    assert "transformers>=4.56,<4.58" in make_recipe(record, "cpu").requirements
    with pytest.raises(NoRuntime, match="enginehouse runtime create my_pinned"):
        choose_runtime(record, package.config()["rollout"]["engine"]["runtime"])


@of("loss")
def test_the_package_of_losses_is_that_of_its_own_test(package: PagePackage):
    assert resolve(loaded(package).get("loss", "wide").function)


def suite_of(page: str) -> str:
    """The suite that a page's test file imports; empty where it has none."""
    found = re.search(r"^from enginehouse_testing import (\w+)$", PagePackage(page).text, re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize(
    "package",
    [page for page in [*WITH_PACKAGE, "tracker"] if suite_of(page) in enginehouse_testing.__all__],
    indirect=True,
)
def test_the_test_file_of_a_page_finds_what_it_tests(package: PagePackage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENGINEHOUSE_PLUGINS", package.plugin)
    monkeypatch.setattr(process, "_current", None)
    (file,) = [text for path, text in package.files.items() if path.startswith("tests/")]
    written: dict[str, type] = {}
    exec(file, written)
    (suite,) = [one for name, one in written.items() if name.startswith("Test")]
    assert suite.record() in process.plugins().providers(suite.record().kind, suite.record().name)[0]


def test_every_block_of_python_on_a_page_can_be_read():
    for path in PAGES.glob("*.md"):
        for block in blocks(path.read_text(), "python"):
            ast.parse(block)


@pytest.mark.parametrize("page", ["rollout-engine", "training-engine", "transport"])
def test_a_page_shows_parts_of_its_example_as_they_are(page: str):
    package = PagePackage(page)
    shown = [block for block in blocks(package.text, "python") if not block.startswith("# ")]
    (source,) = package.examples.values()
    assert len(shown) > 1
    assert [block for block in shown if block not in source and textwrap.indent(block, "    ") not in source] == []


PROMISING = {
    "rollout-engine": ("my_rollout", ["--quick"]),
    "training-engine": ("my_training", ["--quick"]),
    "transport": ("my_transport", []),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PROMISING)
def test_the_engine_or_transport_of_a_page_does_what_it_promises(page: str, tmp_path: Path):
    site = tmp_path / "site"
    site.mkdir()
    PagePackage(page).write(site)
    name, options = PROMISING[page]
    command = [COMMAND, "certify", name, *options, "--out", tmp_path / "certificate"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    assert {check["outcome"] for check in found["checks"]} - {"not declared"} == {"passed"}
