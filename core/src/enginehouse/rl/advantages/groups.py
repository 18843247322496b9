"""Moved to `enginehouse_rl.advantages.groups`."""

from enginehouse.plugin.deprecation import deprecated, moved

_GOES = deprecated("enginehouse.rl.advantages.groups", since="1.1", instead="enginehouse_rl.advantages.groups")
__getattr__ = moved(
    __name__,
    {
        "group_statistics": ("enginehouse_rl.advantages.groups:group_statistics", _GOES),
        "group_sums": ("enginehouse_rl.advantages.groups:group_sums", _GOES),
    },
)
