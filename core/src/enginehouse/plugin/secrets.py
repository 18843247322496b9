"""Secrets in a config. A config names an environment variable, `${NAME}`, instead of containing the secret itself.

The content of a config is written to `config.yaml`, `run.json` and each checkpoint, and sent to trackers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings

_REFERENCE = re.compile(r"(\$?)\$\{(\w+)\}")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = re.compile(
    r"^token$|(^|_)(passw[a-z]*|passphrase|(secret|credential|api_?key)s?|authorization|bearer|(access|account|admin|"
    r"anthropic|api|auth|authentication|aws|azure|bearer|bot|client|encryption|github|gitlab|hf|hub|huggingface|"
    r"license|login|master|openai|personal|private|refresh|secret|service|session|signing|ssh|wandb)_(key|token)s?)$"
)
"""The end of a secret's name. `answer_key` and `eos_token` do not match."""
_KEY_OR_TOKEN = re.compile(r"_(key|token)s?$")
_SIGNATURE = re.compile(r"^sig$|(^|_)signature$")
"""Names of signatures in a URL's query. A signature grants access if its value looks random."""
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~-]{20,}")
"""Text that looks random. It counts as a secret if it is the value of a name that ends with key or token."""
_TELLING = re.compile(
    r"(bearer|basic) [\w+/=.~-]{8,}|(sk-|hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|AIza)[\w-]{16,}"
    r"|.*://[^/\s@:]*:[^/\s@]+@.*",
    re.IGNORECASE | re.DOTALL,
)
"""Values that are secrets under any name: a header, a key of a known form, or a URL with a password. In a URL's query
each value has its own name, and a value named `key` also counts as a secret."""


def insert_variables(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with environment variables in place of `${NAME}`, at any depth. `$${NAME}` becomes `${NAME}`.
    Raises `KeyError` if there is no such variable."""
    return _mapped(arguments, lambda match: match[0][1:] if match[1] else os.environ[match[2]])


def escape_references(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that `insert_variables` turns back into the given ones."""
    return _mapped(arguments, lambda match: f"${match[0]}")


def check_secrets(findings: Findings, key: str, arguments: Mapping[str, Any], *, read: bool = True) -> None:
    """Report each secret in the config, at any depth, and each missing environment variable.

    Args:
        findings: receives the problems.
        key: config key of the arguments.
        read: True if `insert_variables` is applied to the arguments.
    """
    for place, name, text, secret in _texts(arguments, key):
        references = [match[2] for match in _REFERENCE.finditer(text) if not match[1]] if read else []
        if missing := [name for name in references if name not in os.environ]:
            findings.refuse(
                f"{place}: there is no environment variable {missing[0]} (for the text itself write $${{{missing[0]}}})"
            )
        elif not references and text and (secret or _is_secret(name, text)):
            variable = re.sub(r"\W", "_", name.upper())
            findings.refuse(
                f"{place} holds a secret, but the config is written to the run directory and to each checkpoint: set "
                f"an environment variable, such as {variable}, and write ${{{variable}}} in place of the secret"
                if read
                else f"{place} holds a secret, but the config is written to the run directory and to each checkpoint, "
                "and environment variables are not inserted here: leave the key out, and let the code that needs the "
                "secret read an environment variable"
            )


def _texts(value: Any, place: str, name: str = "", secret: bool = False) -> Iterator[tuple[str, str, str, bool]]:
    """Yield each text as (key, nearest name, text, True if a name above belongs to a secret)."""
    if isinstance(value, str):
        yield place, name, value, secret
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{place}.{key}", str(key), secret or _names_secret(str(key)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts(item, f"{place}[{number}]", name, secret)


def _names_secret(name: str) -> bool:
    return bool(_SECRET.search(_words(name)))


def _is_secret(name: str, text: str) -> bool:
    """Return True if a text is a secret even though `_names_secret` does not match its name."""
    random_key = _KEY_OR_TOKEN.search(_words(name)) and _RANDOM.fullmatch(text)
    if random_key or _TELLING.fullmatch(text):
        return True
    query = parse_qsl(text.partition("?")[2]) if "://" in text else []
    return any(
        part == "key"
        or _names_secret(part)
        or _is_secret(part, value)
        # a space is a plus that was not quoted
        or (_SIGNATURE.search(_words(part)) and _RANDOM.fullmatch(value.replace(" ", "+")))
        for part, value in query
    )


def _words(name: str) -> str:
    return "_".join(_WORD.findall(name)).lower()


def _mapped(value: Any, change: Callable[[re.Match[str]], str]) -> Any:
    """Return a value with its references changed, at any depth."""
    if isinstance(value, str):
        return _REFERENCE.sub(change, value) if _REFERENCE.search(value) else value  # else maybe of an `Enum`
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value
