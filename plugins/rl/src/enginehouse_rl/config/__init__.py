"""The typed config of a run: its schema, loading it, and the plan made of it.

Only loading is imported here: `enginehouse_rl.plan.plan` also needs plugins and data files.
"""

from enginehouse_rl.config.load import dump_config, load_config
from enginehouse_rl.config.schema import Config, SFTConfig

__all__ = ["Config", "SFTConfig", "dump_config", "load_config"]
