from projects import project  # noqa: F401 - a fixture
