"""Moved to `enginehouse_rl.advantages.tokens`."""

from enginehouse.plugin.deprecation import deprecated, moved

_GOES = deprecated("enginehouse.rl.advantages.tokens", since="1.1", instead="enginehouse_rl.advantages.tokens")
__getattr__ = moved(__name__, {"CountedTokens": ("enginehouse_rl.advantages.tokens:CountedTokens", _GOES)})
