"""The typed config of a run: its schema, and loading it. `enginehouse_rl.plan` checks it."""

from enginehouse_rl.config.load import dump_config, load_config
from enginehouse_rl.config.schema import Config, SFTConfig

__all__ = ["Config", "SFTConfig", "dump_config", "load_config"]
