"""docs/run-directory.md lists every file that the code puts into a run directory.

That a run leaves no other file: `rl/test_step_by_hand.py`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
SOURCES = [*(ROOT / "plugins/rl/src").rglob("*.py"), *(ROOT / "plugins/report/src").rglob("*.py")]
PATHS = re.compile(r'\b(?:run|self|_?run|_run_path|plan)(?:\.(?:path|directory|run_directory|_run))* / f?"([\w.-]+)')


def test_every_file_that_is_written_to_a_run_directory_is_on_the_page():
    names = {name for path in SOURCES for name in PATHS.findall(path.read_text(encoding="utf-8"))}
    assert {"metrics.jsonl", "samples", "tensorboard", "reward_error", "prometheus"} <= names
    assert not {name for name in names if f"`{name}" not in PAGE}
