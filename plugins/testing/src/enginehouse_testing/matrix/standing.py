"""What a finding stands on: versions of the packages that decided it, where they ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from enginehouse.plugin import Backend, Provided
from enginehouse.plugin.requirements import installed_version
from enginehouse.runtimes import choose_runtime, find_runtime
from enginehouse_testing.certificate import depends_on
from enginehouse_testing.origin import Origin

if TYPE_CHECKING:
    from collections.abc import Sequence


def standing(provided: Provided, device: str) -> dict[str, str]:
    """Versions of core, of the plugin, and of what the engine requires, in the environment its workers run in.

    Nothing is imported to find out.

    Args:
        provided: a backend or a transport, and whose it is.
        device: torch device type of the runs.

    Raises:
        RuntimeProblem: the backend has no environment it can run in.
    """
    record, plugin = provided.record, provided.plugin
    path: Sequence[str] | None = None
    if isinstance(record, Backend):
        interpreter = choose_runtime(record, "auto", device)
        if interpreter.python is not None:
            path = [str(find_runtime(interpreter.name).packages)]
    found = {"enginehouse": installed_version("enginehouse") or "", plugin.distribution: plugin.version}
    for name in depends_on(record):
        if version := installed_version(name, path):
            found[name] = version
    return found


def still_stands(certificate: Mapping[str, Any], now: Mapping[str, str], origin: Origin, device: str) -> bool:
    """Whether a finished certificate of the whole suite is of the device, code and versions that are there now.

    Args:
        certificate: as it was written.
        now: the versions, as `standing` gives them.
        origin: of what is certified.
        device: what its engine would run on now; certificates that name none are of a CPU, or of no engine.
    """
    if (certificate.get("device") or "cpu") != device:
        return False
    if certificate.get("interrupted", True) or not certificate.get("whole", False):
        return False
    if certificate.get("plugin") != asdict(origin):
        return False
    then = {**certificate.get("versions", {}), **certificate.get("runtime", {})}
    return all(then.get(name) == version for name, version in now.items())
