"""Old import paths of the test suites of contract 1.0, which moved to `enginehouse_testing` (enginehouse-testing)."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from enginehouse.plugin.moved import resolve_old_address

        return resolve_old_address(__name__, name)
