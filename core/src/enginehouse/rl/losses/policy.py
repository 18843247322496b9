"""Moved to `enginehouse_rl.losses.policy`."""

from enginehouse.plugin.deprecation import deprecated, moved

_GOES = deprecated("enginehouse.rl.losses.policy", since="1.1", instead="enginehouse_rl.losses.policy")
__getattr__ = moved(
    __name__,
    {
        "PolicyTokens": ("enginehouse_rl.losses.policy:PolicyTokens", _GOES),
        "policy_loss": ("enginehouse_rl.losses.policy:policy_loss", _GOES),
    },
)
