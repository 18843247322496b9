from wheelhouse import wheelhouse  # noqa: F401 - a fixture
