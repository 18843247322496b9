"""The fixtures of tests of plans."""

from collections.abc import Callable

import pytest
from projects import Project, project  # noqa: F401 - a fixture

from enginehouse.config.load import load_config
from enginehouse.config.plan import Plan, plan
from enginehouse.plugin import load_plugins


@pytest.fixture
def make(project: Project) -> Callable[..., Plan]:  # noqa: F811 - it is the fixture
    """Plans the project's config with overrides, where torch and fsdp are installed."""
    plugins = load_plugins(enabled=("torch", "fsdp"))

    def make(*overrides: str) -> Plan:
        path = project.save()
        return plan(load_config(path, overrides), plugins, path)

    return make
