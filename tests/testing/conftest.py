from distributions import distributions  # noqa: F401 - a fixture
