from pathlib import Path

import pytest
from report_runs import make_run

from enginehouse_rl.runs import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run under way that has taken three steps."""
    return make_run(tmp_path / "runs" / "one")
