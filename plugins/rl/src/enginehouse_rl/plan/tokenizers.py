"""Checks that the model of another role uses the tokens of the actor's model, by comparing their tokenizers.

Comparing the sizes of embeddings is not enough. Models of one family pad their embeddings to different sizes, and
tokenizers of different families may have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.errors import ModelError
from enginehouse.jsontext import decode_json
from enginehouse.plugin.findings import Findings
from enginehouse_rl.data.rendering import load_tokenizer


class Tokens(NamedTuple):
    """The string of each token id of a tokenizer, and the ids that were added to its vocabulary."""

    strings: Mapping[int, str]
    added: frozenset[int]


def vocabulary(model: Mapping[str, Any]) -> int | None:
    """Return the number of tokens for which a model has an embedding, from its `config.json`; None if unknown."""
    number = (model.get("text_config") or model).get("vocab_size")
    return number if isinstance(number, int) else None


def read_tokens(path: str, trust_remote_code: bool) -> Tokens | None:
    """Return the tokens of the tokenizer in a directory; None if it cannot be read."""
    file = Path(path) / "tokenizer.json"
    try:
        if not file.is_file():
            tokenizer = load_tokenizer(path, trust_remote_code)
            strings = {number: string for string, number in tokenizer.get_vocab().items()}
            return Tokens(strings, frozenset(tokenizer.added_tokens_decoder))
        content = decode_json(file.read_text(encoding="utf-8"))
        listed = content["model"]["vocab"]
        if isinstance(listed, dict):
            strings = {number: string for string, number in listed.items()}
        else:  # a list of unigrams with their scores
            strings = {number: string for number, (string, *_) in enumerate(listed)}
        added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
        return Tokens(strings | added, frozenset(added))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ModelError):
        return None


def check_tokens(
    findings: Findings,
    role: str,
    paths: tuple[str, str],
    models: tuple[Mapping[str, Any], Mapping[str, Any]],
    trust_remote_code: bool,
) -> None:
    """Check that a role's model uses the actor's tokens.

    If an added token has different names in the two tokenizers, there is only a note, because chat models of one family
    rename added tokens that they do not use.

    Args:
        role: the name of the role, which is also the key of its section.
        paths: the directories of the actor's model and of the role's model.
        models: the `config.json` of both models.
        trust_remote_code: passed to transformers, for a tokenizer that only transformers can read.

    Raises:
        ModelError: the tokens differ or, if a tokenizer cannot be read, the sizes of the vocabularies differ.
    """
    actor, own = (read_tokens(path, trust_remote_code) for path in paths)
    sizes = [vocabulary(model) for model in models]
    cure = f"a {role} reads the actor's tokens, so both models must have the same tokenizer"
    if actor is None or own is None:
        if None not in sizes and sizes[0] != sizes[1]:
            raise ModelError(
                f"{role}.path: {paths[1]} has a vocabulary of {sizes[1]} tokens, but model.path has {sizes[0]}: {cure}"
            )
        return
    most = max(actor.strings, default=-1)
    if sizes[1] is not None and most >= sizes[1]:
        raise ModelError(
            f"{role}.path: {paths[1]} has embeddings for {sizes[1]} tokens, but model.path has a token {most}: {cure}"
        )
    known = set(own.strings.values())
    differing = {number: string for number, string in actor.strings.items() if own.strings.get(number) != string}
    wrong = sorted(number for number, string in differing.items() if number not in actor.added or string in known)
    if wrong:
        token, actors = _name_token(own, wrong[0]), _name_token(actor, wrong[0])
        raise ModelError(
            f"{role}.path: {paths[1]} has {token}, but model.path has {actors}; {len(wrong)} of "
            f"{len(actor.strings)} tokens differ: {cure}"
        )
    if differing:
        first = min(differing)
        findings.note(
            f"{role}.path: {paths[1]} lacks {len(differing)} of the actor's added tokens (it has "
            f"{_name_token(own, first)}, but model.path has {_name_token(actor, first)}): the {role} may misread them"
        )


def _name_token(tokens: Tokens, number: int) -> str:
    string = tokens.strings.get(number)
    return f"no token {number}" if string is None else f"{string!r} as token {number}"
