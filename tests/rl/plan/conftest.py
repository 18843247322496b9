"""The fixtures of tests of plans."""

from collections.abc import Callable
from functools import partial

import pytest
from projects import Project, project  # noqa: F401 - a fixture

from enginehouse.plugin import PluginManager, load_plugins
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import SFTConfig
from enginehouse_rl.plan.plan import Plan, SFTPlan, plan_sft


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    """Core's own plugins, `torch` and `fsdp`, whatever is installed."""
    return load_plugins(enabled=("torch", "fsdp"))


@pytest.fixture
def make(project: Project, plugins: PluginManager) -> Callable[..., Plan]:  # noqa: F811 - it is the fixture
    """Plans the project's config with overrides."""
    return partial(project.planned, plugins=plugins)


@pytest.fixture
def make_sft(project: Project, plugins: PluginManager) -> Callable[..., SFTPlan]:  # noqa: F811
    """Plans the project's supervised config with overrides."""

    def make(*overrides: str) -> SFTPlan:
        path = project.save_sft()
        return plan_sft(load_config(path, overrides, SFTConfig), plugins, path)

    return make
