"""docs/plugins/loss.md: its examples are losses and a package, and plan takes and checks them as the page says."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import yaml
from distributions import Distributions
from plugin_pages import PAGES, PagePackage, blocks
from projects import Project

from enginehouse.data import Batch, Ragged
from enginehouse.engines import TokenView
from enginehouse.errors import ConfigError
from enginehouse.plugin import resolve
from enginehouse.roles.workers import fill_defaults

PAGE = (PAGES / "loss.md").read_text(encoding="utf-8")


@pytest.fixture
def written(project: Project) -> Project:
    """A project with the page's loss in the page's place."""
    (project.root / "my_losses.py").write_text(blocks(PAGE, "python")[0])
    project.config |= yaml.safe_load(blocks(PAGE, "yaml")[0])
    return project


def test_the_loss_on_the_page_of_losses_is_planned_and_its_range_is_checked(written: Project):
    assert written.planned().loss.arguments == {"clip": 0.3}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.arguments\.clip"):
        written.planned("algorithm.loss.arguments.clip=2")


def test_the_loss_on_the_page_of_losses_is_that_of_its_docstring(written: Project, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(written.root))
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0], requires_grad=True)
    columns = {
        "loss_mask": torch.tensor([False, True, True, False, True]),
        "old_logprobs": torch.tensor([0.0, -1.0, -3.0, 0.0, -3.0]),
        "advantages": torch.tensor([9.0, 1.0, 2.0, 9.0, -1.0]),
    }
    view = TokenView({"logprobs": logprobs}, columns, torch.tensor([0, 0, 0, 1, 1]), 2)
    value = resolve("my_losses:my_loss")(view, clip=0.5)
    assert (value.total.item(), value.weight) == (1.0 + 1.5 * 2 * 2.0 - 3.0, 3.0)
    assert value.metrics["cut"].value == pytest.approx(1 / 3)
    value.total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -1.0, -3.0, 0.0, 1.0]


@pytest.fixture
def package(project: Project, distributions: Distributions) -> Iterator[Project]:
    """The page's package, installed as its `pyproject.toml` says, and a config that names what it brings."""
    with PagePackage("loss").installed(distributions.site) as page:
        project.config |= page.config(1)
        yield project


def test_the_package_on_the_page_of_losses_is_planned(package: Project):
    planned = partial(package.planned, enabled=("torch", "my_algorithm"))
    assert planned().advantage_needs == ("reward", "group")
    assert planned().loss.arguments == {"clip": 0.1, "max_tokens": 8}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.arguments\.clip: expected at most 0\.5"):
        planned("algorithm.loss.arguments.clip=0.7")


@pytest.mark.usefixtures("package")
def test_the_loss_of_the_page_of_losses_reads_the_column_of_its_advantage():
    advantage, loss = resolve("my_algorithm.rarity:rare"), resolve("my_algorithm.rarity:wide")
    mask = Ragged.from_list([[False, True]] * 4)
    rewards = {"reward": torch.tensor([1.0, 0.0, 0.0, 0.0]), "group": torch.zeros(4, dtype=torch.int64)}
    batch = fill_defaults(advantage(Batch({**rewards, "loss_mask": mask})))
    assert batch["rarity"].tolist() == [0.75, 0.25, 0.25, 0.25]
    columns = {name: batch[name].values for name in ("loss_mask", "advantages")} | {"rarity": batch["rarity"]}
    logprobs = torch.tensor([0.0, 0.3, 0.0, -0.3, 0.0, 0.0, 0.0, 0.0], requires_grad=True)
    view = TokenView({"logprobs": logprobs}, columns | {"old_logprobs": torch.zeros(8)}, mask.row, 4)
    value = loss(view, clip=0.2)
    assert value.weight == 4
    assert value.total.item() == pytest.approx(-(0.75 * math.exp(0.3) - 0.25 * 0.75 - 0.25 - 0.25))
    value.total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, -0.75 * math.exp(0.3), 0, 0, 0, 0.25, 0, 0.25])
