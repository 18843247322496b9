from distributions import distributions  # noqa: F401 - a fixture
from projects import project  # noqa: F401 - a fixture
