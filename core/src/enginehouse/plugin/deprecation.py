"""Deprecation of parts of the contract. A plugin that uses a deprecated part gets a warning when it is loaded.

A deprecation is one line beside the definition of the deprecated part:

* a hook: `@hookspec(warn_on_impl=deprecated(...))`;
* an argument of a hook: `@hookspec(warn_on_impl_args={"seconds": deprecated(...)})`;
* a field of a record: `field(default="", metadata={DEPRECATED: deprecated(...)})`;
* a name of a module: `__getattr__ = moved(__name__, {"Old": ("enginehouse.engines:New", deprecated(...))})`. If the
  module has an `exports(...)`, pass it as third argument. This does not work in `enginehouse.errors`, which this
  module imports.

Warnings during loading become the plugin's note in `enginehouse plugins list`, and a run logs them once. If a worker
imports a deprecated name later, the warning appears in the worker, like any `FutureWarning`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from enginehouse.plugin.records import Record, resolve

DEPRECATED = "deprecated"
"""Key in the metadata of a record's field. Its value is the `ContractDeprecation` for setting the field."""


class ContractDeprecation(FutureWarning):
    """A plugin uses a part of the contract that the next major version will remove."""


def deprecated(what: str, *, since: str, instead: str) -> ContractDeprecation:
    """Return the warning for one deprecated part.

    Args:
        what: the deprecated part as authors of plugins know it, such as `"Loss.output"` or
            `"enginehouse_validated(step)"`.
        since: first contract version that warns, such as `"1.2"`.
        instead: the replacement.
    """
    major = int(since.partition(".")[0]) + 1
    return ContractDeprecation(f"{what} is deprecated since contract {since}, and {major}.0 removes it: use {instead}")


def warn_of_fields(record: Record) -> None:
    """Warn of each deprecated field of a record whose value is not the default."""
    for field in fields(record):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if (warning := field.metadata.get(DEPRECATED)) is not None and getattr(record, field.name) != default:
            warnings.warn(warning, stacklevel=2)


def moved(
    module: str, names: Mapping[str, tuple[str, ContractDeprecation]], others: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Make the module-level `__getattr__` (PEP 562) of a module with deprecated names.

    Args:
        module: `__name__` of the module.
        names: the deprecated names. Each has the `"module:attribute"` of its value, and the warning.
        others: the `__getattr__` for all other names, such as `enginehouse.lazy.exports(...)`; None: no other names.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            if others is not None:
                return others(name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        reference, warning = names[name]
        warnings.warn(warning, stacklevel=2)
        return resolve(reference)

    return __getattr__


@contextlib.contextmanager
def gather_deprecations() -> Iterator[list[str]]:
    """Collect the distinct deprecation warnings of the block as texts. Other warnings are shown as usual."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ContractDeprecation)
        try:
            yield texts
        finally:
            texts += dict.fromkeys(str(item.message) for item in caught if _is_deprecation(item))
    for item in caught:
        if not _is_deprecation(item):
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)


def _is_deprecation(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, ContractDeprecation)
