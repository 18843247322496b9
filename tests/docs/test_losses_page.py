"""docs/losses.md: its example is a loss, and plan takes and checks it as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from projects import Project

from enginehouse.config.load import load_config
from enginehouse.config.plan import plan
from enginehouse.engines import TokenView
from enginehouse.errors import ConfigError
from enginehouse.plugin import load_plugins, resolve

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The page's only block in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture
def written(project: Project) -> Project:
    """A project with the page's loss in the page's place."""
    (project.root / "my_losses.py").write_text(block("python"))
    project.config |= yaml.safe_load(block("yaml"))
    return project


def test_the_loss_on_the_page_of_losses_is_planned_and_its_range_is_checked(written: Project):
    def planned(*overrides: str) -> Any:
        path = written.save()
        return plan(load_config(path, overrides), load_plugins(enabled=("torch",)), path)

    assert planned().loss_arguments == {"clip": 0.3}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.arguments\.clip"):
        planned("algorithm.loss.arguments.clip=2")


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
