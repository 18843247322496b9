"""Compares a certificate with the installed versions."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from enginehouse.errors import DataError, UserError, first_line
from enginehouse.plugin.requirements import installed_version
from enginehouse_rl.plan.device import pick_device
from enginehouse_testing.certificate import Outcome
from enginehouse_testing.naming import record_of
from enginehouse_testing.origin import origin_of

NEEDED = {
    "backend": str, "kind": str, "interrupted": bool, "whole": bool, "checks": list, "versions": dict, "written": str
}  # fmt: skip
"""Keys of every certificate, and the types of their values."""


def read_certificate(path: Path) -> dict[str, Any]:
    """Return a certificate as it was written, except that `passed` is computed from its checks.

    Raises:
        DataError: the file is no certificate, or it has no checks.
    """
    try:
        certificate = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a certificate: {first_line(error)}") from error
    content = certificate if isinstance(certificate, dict) else {}
    missing = [name for name, cls in NEEDED.items() if not isinstance(content.get(name), cls)]
    if not missing and not (content["checks"] and all(isinstance(check, dict) for check in content["checks"])):
        missing = ["checks"]
    if missing:
        raise DataError(f"{path} is no certificate of `enginehouse certify`: it lacks {', '.join(missing)}")
    outcomes = {str(check.get("outcome")) for check in content["checks"]}
    sound = "passed" in outcomes and outcomes <= {*get_args(Outcome)} - {"failed"}
    return {**content, "passed": sound and content["whole"] and not content["interrupted"]}


def differences(certificate: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference between the installed and the certified software.

    It compares the record's distribution, the digest of its code, and versions of its dependencies. Versions in an
    engine's own Python environment are compared with the versions in the environment that the engine would use now.
    """
    name, kind = certificate["backend"], certificate["kind"]
    try:
        record = record_of(kind, name)
        origin = origin_of(record)
    except (UserError, ValueError) as error:
        return [f"{kind} {name}: {first_line(error)}"]
    then = certificate.get("plugin") or {}
    lines = [
        _line(f"plugin {what}", then.get(what, ""), getattr(origin, what))
        for what in ("distribution", "version", "digest")
        if then.get(what, "") != getattr(origin, what)
    ]
    for package, version in certificate["versions"].items():
        now = platform.python_version() if package == "python" else installed_version(package) or ""
        if version != now and package != origin.distribution:
            lines.append(_line(package, version, now))
    if runtime := certificate.get("runtime"):
        lines += _runtime_differences(kind, name, runtime, certificate.get("device") or pick_device("auto")[0])
    return lines


def _runtime_differences(kind: str, name: str, runtime: Mapping[str, str], device: str) -> list[str]:
    from enginehouse.plugin import plugins
    from enginehouse_testing.matrix.standing import standing

    try:
        now = standing(plugins().providers(kind, name)[0], device)
    except UserError as error:
        return [f"runtime: {first_line(error)}"]
    return [
        _line(f"{package} of the runtime", version, now[package])
        for package, version in runtime.items()
        if package in now and version != now[package]
    ]


def _line(what: str, then: str, now: str) -> str:
    return f"{what}: certified {then or 'none'}, installed {now or 'none'}"
