"""The typed config of a run: its schema, loading it, and the plan made of it.

Only loading is imported here: `enginehouse.config.plan` also needs plugins and data files.
"""

from enginehouse.config.load import dump_config, load_config
from enginehouse.config.schema import Config, SFTConfig

__all__ = ["Config", "SFTConfig", "dump_config", "load_config"]
