"""Reads the certificates of the parts that the matrix combines, and makes missing or outdated certificates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.errors import EnginehouseError, UserError
from enginehouse.plugin import Backend, Transport
from enginehouse_testing.matrix.single_run import shortened
from enginehouse_testing.matrix.standing import standing, still_stands
from enginehouse_testing.model_under_test import TINY, ModelUnderTest, folder_of
from enginehouse_testing.origin import origin_of
from enginehouse_testing.running import Case, certify, device_of

if TYPE_CHECKING:
    from enginehouse.plugin import Provided
    from enginehouse_testing.certificate import Certificate


def certified(
    provided: Provided,
    directory: Path,
    device: str,
    *,
    make: bool,
    again: bool = False,
    model: ModelUnderTest = TINY,
    begins: Callable[[Case, int, int], None] = lambda case, number, of: None,
) -> dict[str, Any]:
    """Return the summary of a part's certificate, `<kind>/<name>/certificate.json` in a directory. For a user's model,
    the file is in a subfolder of the model.

    Args:
        provided: a backend or a transport, and its plugin.
        directory: directory of all certificates.
        device: torch device type of the runs.
        make: True to make a certificate if there is none for the installed code and versions.
        again: True to make a certificate even if there is one; requires `make`.
        model: the model of the certificate.
        begins: see `certify`.

    Returns:
        The result of `findings`. If there is no certificate: only `backend`, `kind`, `passed` (False) and `problem`,
        and `failed` if the certificate could not be made.
    """
    record = provided.record
    assert isinstance(record, Backend | Transport)
    place = directory / record.kind / record.name / folder_of(model.label)
    nothing = {"backend": record.name, "kind": record.kind, "model": model.label, "passed": False}
    try:
        now = standing(provided, device)
        former = None if make and again else _read(place / "certificate.json")
        same_model = former is not None and former.get("model", "") == model.label
        if former is not None and same_model and still_stands(former, now, origin_of(record), device_of(record)):
            return findings(former)
        if not make:
            return {**nothing, "problem": "there is no certificate for the installed code and versions"}

        def ended(certificate: Certificate) -> None:
            certificate.write(place)

        return findings(certify(record, model=model, begins=begins, ended=ended).as_json())
    except UserError as error:
        return {**nothing, "problem": shortened(str(error))}
    except EnginehouseError as error:
        message = shortened(str(error))
        return {**nothing, "problem": message, "failed": [_first_line(message)]}


def findings(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize a certificate as plain data.

    Returns:
        `backend`, `kind`, label of the `model`, `passed`, `written`, `versions` where it ran, checked `layouts`,
        `counts` of outcomes, a line for each check that `failed`, and `nearest`: `name`, `layout`, `measured` and
        `tolerance` of the result that comes nearest to its tolerance, or None if no check has a tolerance above 0. For
        a user's model also `measured`: all results with such a tolerance.
    """
    checks = certificate["checks"]
    layouts = [layout for check in checks for layout in check["layout"].split(" -> ") if layout]
    measured = [
        {key: check[key] for key in ("name", "layout", "measured", "tolerance")}
        for check in checks
        if check["tolerance"] and isinstance(check["measured"], (int, float))
    ]
    nearest = max(measured, key=lambda check: check["measured"] / check["tolerance"], default=None)
    failed = [check for check in checks if check["outcome"] == "failed"]
    return {
        "backend": certificate["backend"],
        "kind": certificate["kind"],
        "model": certificate.get("model", ""),
        "passed": certificate["passed"],
        "written": certificate["written"],
        "versions": {**certificate["versions"], **certificate["runtime"]},
        "layouts": list(dict.fromkeys(layouts)),
        "counts": dict(Counter(check["outcome"] for check in checks)),
        "failed": [
            shortened(f"{check['name']} at {check['layout']}: {_first_line(check['detail'])}") for check in failed
        ],
        "nearest": nearest,
        **({"measured": measured} if certificate.get("model") else {}),
    }


def _read(path: Path) -> dict[str, Any] | None:
    """Return a certificate, or None if there is none that can be read."""
    try:
        certificate = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return certificate if isinstance(certificate, dict) and "written" in certificate else None


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
