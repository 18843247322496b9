"""Old addresses of the suites of contract 1.0, which are in `enginehouse_testing` (enginehouse-testing) now."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from enginehouse.plugin.moved import resolve_old_address

        return resolve_old_address(__name__, name)
