"""Saying that something of the contract will go: a plugin that uses it is told so where it is loaded.

A deprecation is one line where the thing stands:

* a hook: `@hookspec(warn_on_impl=deprecated(...))`;
* an argument of a hook: `@hookspec(warn_on_impl_args={"seconds": deprecated(...)})`;
* a field of a record: `field(default="", metadata={DEPRECATED: deprecated(...)})`;
* a name of a module: `__getattr__ = moved(__name__, {"Old": ("enginehouse.engines:New", deprecated(...))})`, and where
  there is an `exports(...)`, that as the third argument. Not in `enginehouse.errors`, which this module stands on.

What a plugin uses while it is loaded is its note in `enginehouse plugins list`, and is logged once by a run. A name
that is imported later, in a worker, warns there, as any `FutureWarning` does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from enginehouse.plugin.records import Record, resolve

DEPRECATED = "deprecated"
"""Key of a record's field in its metadata: the `ContractDeprecation` of giving it."""


class ContractDeprecation(FutureWarning):
    """Something of the contract is used that the next major version goes without."""


def deprecated(what: str, *, since: str, instead: str) -> ContractDeprecation:
    """Make the warning of one deprecated thing.

    Args:
        what: as a plugin's author writes it: `"Loss.output"`, `"enginehouse_validated(step)"`.
        since: the contract version from which on it warns, `"1.2"`.
        instead: what to use.
    """
    goes = int(since.partition(".")[0]) + 1
    return ContractDeprecation(f"{what} is deprecated since contract {since} and goes with {goes}.0: use {instead}")


def warn_of_fields(record: Record) -> None:
    """Warn of each deprecated field of a record that is not left at its default."""
    for one in fields(record):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if (warning := one.metadata.get(DEPRECATED)) is not None and getattr(record, one.name) != default:
            warnings.warn(warning, stacklevel=2)


def moved(
    module: str, names: Mapping[str, tuple[str, ContractDeprecation]], others: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Make the module-level `__getattr__` (PEP 562) of a module that has deprecated names.

    Args:
        module: its `__name__`.
        names: for each name `"module:attribute"` of what it gives, and the warning.
        others: the `__getattr__` of the module's other names, `enginehouse.lazy.exports(...)`.
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
    """Gather what is said of deprecated things inside, each once; all other warnings are shown as ever."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ContractDeprecation)
        try:
            yield found
        finally:
            found += dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, ContractDeprecation))
    for one in caught:
        if not issubclass(one.category, ContractDeprecation):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
