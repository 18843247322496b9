"""Where the suites were in contract 1.0: they are in `enginehouse_testing` now, of enginehouse-testing."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from enginehouse.plugin.moved import resolve_old_address

        return resolve_old_address(__name__, name)
