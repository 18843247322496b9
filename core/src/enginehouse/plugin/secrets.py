"""Secrets in a config: it names the environment variable, `${NAME}`, and never holds the secret itself.

What a config holds is written to `config.yaml`, `run.json` and each checkpoint, and sent to trackers.
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
"""The end of a secret's name; `answer_key` and `eos_token` are none."""
_KEY_OR_TOKEN = re.compile(r"_(key|token)s?$")
_SIGNATURE = re.compile(r"^sig$|(^|_)signature$")
"""The name in a URL's query of what opens it to whoever has it, where that looks drawn."""
_DRAWN = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~-]{20,}")
"""Looks drawn at random; is one as the value of any key or token."""
_TELLING = re.compile(
    r"(bearer|basic) [\w+/=.~-]{8,}|(sk-|hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|AIza)[\w-]{16,}"
    r"|.*://[^/\s@:]*:[^/\s@]+@.*",
    re.IGNORECASE | re.DOTALL,
)
"""A value that is a secret whatever it is called: a header, a key of a known form, a URL with a password. In a URL's
query each value has a name of its own, of which `key` is a secret's, too."""


def insert_variables(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with environment variables in place of `${NAME}`, at any depth; `$${NAME}` becomes `${NAME}`.

    Raises:
        KeyError: there is no such variable.
    """
    return _mapped(arguments, lambda found: found[0][1:] if found[1] else os.environ[found[2]])


def escape_references(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that `insert_variables` gives back as they are here."""
    return _mapped(arguments, lambda found: f"${found[0]}")


def check_secrets(findings: Findings, key: str, arguments: Mapping[str, Any], *, read: bool = True) -> None:
    """Refuse a secret that stands in the config, at any depth, and a variable that is not there.

    Args:
        key: the config key of the arguments.
        read: whether they go through `insert_variables`.
    """
    for place, name, text, secret in _texts(arguments, key):
        references = [found[2] for found in _REFERENCE.finditer(text) if not found[1]] if read else []
        if missing := [name for name in references if name not in os.environ]:
            findings.refuse(
                f"{place}: there is no environment variable {missing[0]} (for the text itself write $${{{missing[0]}}})"
            )
        elif not references and text and (secret or _is_secret(name, text)):
            variable = re.sub(r"\W", "_", name.upper())
            findings.refuse(
                f"{place} holds a secret, and what a config holds is written to the run directory and to each "
                f"checkpoint: set an environment variable, {variable} say, and write ${{{variable}}} in its place"
                if read
                else f"{place} is a secret's, and nothing is read from the environment here; what a config holds is "
                "written to the run directory and to each checkpoint: leave it out, and have the code that needs it "
                "read an environment variable"
            )


def _texts(value: Any, place: str, name: str = "", secret: bool = False) -> Iterator[tuple[str, str, str, bool]]:
    """Every text: where it stands, the name that is nearest, itself, and whether a name above says it is a secret."""
    if isinstance(value, str):
        yield place, name, value, secret
    elif isinstance(value, Mapping):
        for inner, held in value.items():
            yield from _texts(held, f"{place}.{inner}", str(inner), secret or _names_secret(str(inner)))
    elif isinstance(value, list | tuple):
        for number, held in enumerate(value):
            yield from _texts(held, f"{place}[{number}]", name, secret)


def _names_secret(name: str) -> bool:
    return bool(_SECRET.search(_words(name)))


def _is_secret(name: str, text: str) -> bool:
    """Whether a text is one, whose name alone does not say so."""
    drawn = _KEY_OR_TOKEN.search(_words(name)) and _DRAWN.fullmatch(text)
    if drawn or _TELLING.fullmatch(text):
        return True
    query = parse_qsl(text.partition("?")[2]) if "://" in text else []
    return any(
        part == "key"
        or _names_secret(part)
        or _is_secret(part, value)
        or (_SIGNATURE.search(_words(part)) and _DRAWN.fullmatch(value.replace(" ", "+")))  # a plus that was not quoted
        for part, value in query
    )


def _words(name: str) -> str:
    return "_".join(_WORD.findall(name)).lower()


def _mapped(value: Any, change: Callable[[re.Match[str]], str]) -> Any:
    """A value with what is a reference changed, at any depth."""
    if isinstance(value, str):
        return _REFERENCE.sub(change, value) if _REFERENCE.search(value) else value  # it may be a member of an `Enum`
    if isinstance(value, Mapping):
        return {name: _mapped(held, change) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(held, change) for held in value)
    return value
