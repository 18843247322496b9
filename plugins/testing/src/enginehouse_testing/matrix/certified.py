"""Certificates of what the matrix combines: read where they still stand, made where they do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.errors import EnginehouseError, UserError
from enginehouse.plugin import Backend, Transport
from enginehouse_testing.matrix.running import shortened
from enginehouse_testing.matrix.standing import standing, still_stands
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
    begins: Callable[[Case, int, int], None] = lambda case, number, of: None,
) -> dict[str, Any]:
    """The findings of a certificate, in short; the certificate is `<kind>/<name>/certificate.json` of a directory.

    Args:
        provided: a backend or a transport, and whose it is.
        directory: of certificates.
        device: torch device type of the runs.
        make: where there is none of the code and versions that are here, make one; else that is what is said of it.
        again: with `make`, make one even where there is one.
        begins: as of `certify`.

    Returns:
        `findings`; only `backend`, `kind`, `passed` (False) and `problem` where there is no certificate, and `failed`
        where it could not be made.
    """
    record = provided.record
    assert isinstance(record, Backend | Transport)
    place = directory / record.kind / record.name
    nothing = {"backend": record.name, "kind": record.kind, "passed": False}
    try:
        now = standing(provided, device)
        there = _read(place / "certificate.json")
        if (
            there is not None
            and still_stands(there, now, origin_of(record), device_of(record))
            and not (make and again)
        ):
            return findings(there)
        if not make:
            return {**nothing, "problem": "there is no certificate of the code and versions that are installed"}

        def ended(certificate: Certificate) -> None:
            certificate.write(place)

        return findings(certify(record, begins=begins, ended=ended).as_json())
    except UserError as error:
        return {**nothing, "problem": shortened(str(error))}
    except EnginehouseError as error:
        said = shortened(str(error))
        return {**nothing, "problem": said, "failed": [_first_line(said)]}


def findings(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """A certificate in short, as plain data.

    Returns:
        `backend`, `kind`, `passed`, `written`, `versions` (where it ran), `layouts` that were checked, `counts` of
        outcomes, `failed` (a line each), and `nearest`: of the checks with a tolerance the result that comes nearest
        to it, as `name`, `layout`, `measured`, `tolerance`; None where there is none.
    """
    checks = certificate["checks"]
    counts: dict[str, int] = {}
    for check in checks:
        counts[check["outcome"]] = counts.get(check["outcome"], 0) + 1
    layouts = [one for check in checks for one in check["layout"].split(" -> ") if one]
    measured = [one for one in checks if one["tolerance"] and isinstance(one["measured"], (int, float))]
    nearest = max(measured, key=lambda one: one["measured"] / one["tolerance"], default=None)
    failed = [one for one in checks if one["outcome"] == "failed"]
    return {
        "backend": certificate["backend"],
        "kind": certificate["kind"],
        "passed": certificate["passed"],
        "written": certificate["written"],
        "versions": {**certificate["versions"], **certificate["runtime"]},
        "layouts": list(dict.fromkeys(layouts)),
        "counts": counts,
        "failed": [shortened(f"{one['name']} at {one['layout']}: {_first_line(one['detail'])}") for one in failed],
        "nearest": nearest and {key: nearest[key] for key in ("name", "layout", "measured", "tolerance")},
    }


def _read(path: Path) -> dict[str, Any] | None:
    """A certificate; None where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "written" in found else None


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
