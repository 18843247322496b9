from distributions import distributions  # noqa: F401 - a fixture
from wheelhouse import wheelhouse  # noqa: F401 - a fixture
