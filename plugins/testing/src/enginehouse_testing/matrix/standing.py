"""Versions on which a finding depends, and a check that a certificate still has these versions."""

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
    """Return versions of core, the plugin, and the engine's requirements in the environment of its workers.

    Nothing is imported.

    Args:
        provided: a backend or a transport, and its plugin.
        device: torch device type of the runs.

    Raises:
        RuntimeProblem: the backend has no environment in which it can run.
    """
    record, plugin = provided.record, provided.plugin
    path: Sequence[str] | None = None
    if isinstance(record, Backend):
        interpreter = choose_runtime(record, "auto", device)
        if interpreter.python is not None:
            path = [str(find_runtime(interpreter.name).packages)]
    versions = {"enginehouse": installed_version("enginehouse") or "", plugin.distribution: plugin.version}
    for name in depends_on(record):
        if version := installed_version(name, path):
            versions[name] = version
    return versions


def still_stands(certificate: Mapping[str, Any], now: Mapping[str, str], origin: Origin, device: str) -> bool:
    """Return True if a certificate is finished and whole, and was made on this device with this code and versions.

    Args:
        certificate: the certificate, as it was written.
        now: the versions; see `standing`.
        origin: distribution and code of the record.
        device: the engine's device now. A certificate without a device counts as made on the CPU.
    """
    is_whole = certificate.get("whole", False) and not certificate.get("interrupted", True)
    same_device = (certificate.get("device") or "cpu") == device
    if not is_whole or not same_device or certificate.get("plugin") != asdict(origin):
        return False
    then = {**certificate.get("versions", {}), **certificate.get("runtime", {})}
    return all(then.get(name) == version for name, version in now.items())
