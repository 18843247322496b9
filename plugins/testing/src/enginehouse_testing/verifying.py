"""Whether a certificate is of what is installed here."""

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
"""What every certificate has."""


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate as it was written; what it says of `passed` is found anew from its checks.

    Raises:
        DataError: the file is none, or has no checks.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a certificate: {first_line(error)}") from error
    wrong = [name for name, of in NEEDED.items() if not isinstance(found, dict) or not isinstance(found.get(name), of)]
    if not wrong and not (found["checks"] and all(isinstance(one, dict) for one in found["checks"])):
        wrong = ["checks"]
    if wrong:
        raise DataError(f"{path} is no certificate of `enginehouse certify`: it lacks {', '.join(wrong)}")
    outcomes = {str(one.get("outcome")) for one in found["checks"]}
    sound = "passed" in outcomes and outcomes <= {*get_args(Outcome)} - {"failed"}
    return {**found, "passed": sound and found["whole"] and not found["interrupted"]}


def differences(certificate: Mapping[str, Any]) -> list[str]:
    """In a line each, how what is installed differs from what was certified; empty: it is the same.

    Whose the record is, the digest of its code, and versions of what its results depend on. Versions in a Python
    environment of an engine's own are compared with those of the environment that it would run in now.
    """
    name, kind = certificate["backend"], certificate["kind"]
    try:
        record = record_of(kind, name)
        origin = origin_of(record)
    except (UserError, ValueError) as error:
        return [f"{kind} {name}: {first_line(error)}"]
    found = []
    then = certificate.get("plugin") or {}
    for what in ("distribution", "version", "digest"):
        if then.get(what, "") != getattr(origin, what):
            found.append(_line(f"plugin {what}", then.get(what, ""), getattr(origin, what)))
    here = {"python": platform.python_version()}
    owner = origin.distribution
    for package, version in certificate["versions"].items():
        now = here.get(package) or installed_version(package) or ""
        if version != now and package != owner:
            found.append(_line(package, version, now))
    if runtime := certificate.get("runtime"):
        found += _runtime_differences(kind, name, runtime, certificate.get("device") or pick_device("auto")[0])
    return found


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
