"""The tiny models of `enginehouse.testing.models`, under the name older tests import."""

from __future__ import annotations

from enginehouse.testing.models import (
    CHARACTERS,
    EOS_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    char_tokenizer,
    tiny_model,
)

__all__ = ["CHARACTERS", "EOS_ID", "PAD_ID", "SPECIAL_TOKENS", "VOCABULARY_SIZE", "char_tokenizer", "tiny_model"]
