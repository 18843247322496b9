"""Moved to `enginehouse_rl.losses.aggregate`."""

from enginehouse.plugin.deprecation import deprecated, moved

_GOES = deprecated("enginehouse.rl.losses.aggregate", since="1.1", instead="enginehouse_rl.losses.aggregate")
__getattr__ = moved(__name__, {"aggregate": ("enginehouse_rl.losses.aggregate:aggregate", _GOES)})
