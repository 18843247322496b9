"""Secrets that a reward needs: a config names the environment variable, `${NAME}`, and never holds the secret itself.

What a config holds is written to `config.yaml`, `run.json` and each checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.config.findings import Findings

_REFERENCE = re.compile(r"\$\{(\w+)\}")
_SECRET = re.compile(r"(^|_)(api_?key|secret|password|(access|auth|bearer|hf)_token)$", re.IGNORECASE)


def from_environment(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the value of the environment variable where one is `${NAME}`.

    Raises:
        KeyError: there is no such variable.
    """
    return {
        name: os.environ[found[1]] if isinstance(value, str) and (found := _REFERENCE.fullmatch(value)) else value
        for name, value in arguments.items()
    }


def check_secrets(findings: Findings, key: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a secret that stands in the config, and a variable that is not there; `key` names the arguments."""
    for name, value in arguments.items():
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if found and found[1] not in os.environ:
            findings.refuse(f"{key}.{name}: there is no environment variable {found[1]}")
        elif not found and isinstance(value, str) and value and _SECRET.search(name):
            findings.refuse(
                f"{key}.{name} holds a secret, and what a config holds is written to the run directory and to each "
                f"checkpoint: set an environment variable, {name.upper()} say, and write ${{{name.upper()}}} here"
            )
