"""Writes docs/reliability.md, on faults, and docs/plugins/bad-plugins.md from tests: `make reliability`.

A page has one row for each test with its marker. Tests are read, not run. A marker holds only literal strings, so that
no engine has to be installed to write the pages.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Page(NamedTuple):
    """A page that tests write.

    Attributes:
        path: path of its file.
        marker: marker of the tests that are its rows.
        columns: headings, by the marker's keyword.
        head: text before the rows.
        area: keyword by which rows are grouped under headings; empty: one table.
        rejected: keyword of an error message, which the page shows as "rejected"; empty: none.
        lists_tests: True if the page ends with a list of the tests.
    """

    path: Path
    marker: str
    columns: dict[str, str]
    head: str
    area: str = ""
    rejected: str = ""
    lists_tests: bool = False

    def text(self) -> str:
        """Return the page's text."""
        lines = [self.head.rstrip("\n")]
        heads = [f"| {' | '.join(self.columns.values())} |", "|---" * len(self.columns) + "|"]
        area, rows = None, self._rows()
        for row in rows:
            if row.get(self.area, "") != area:
                area = row.get(self.area, "")
                lines += [*([f"\n## {area}"] if area else []), "", *heads]
            cells = [row[keyword] for keyword in self.columns]
            lines.append("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |")
        if self.lists_tests:
            lines += ["\n## Tests\n", "In the order of the rows above.\n", *(f"- `{row['test']}`" for row in rows)]
        return "\n".join(lines) + "\n"

    def _rows(self) -> list[dict[str, str]]:
        """Return every row, by area, then by the place of its test."""
        found = [row for path in sorted((ROOT / "tests").rglob("test_*.py")) for row in self._rows_of(path)]
        return sorted(found, key=lambda row: row.get(self.area, ""))

    def _rows_of(self, path: Path) -> Iterator[dict[str, str]]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"pytest.mark.{self.marker}":
                    values: dict[str, Any] = {
                        word.arg or "": ast.literal_eval(word.value) for word in decorator.keywords
                    }
                    if values.get(self.rejected, "works") != "works":
                        values[self.rejected] = "rejected"
                    yield {**values, "test": f"{path.relative_to(ROOT)}::{node.name}"}


FAULTS = Page(
    ROOT / "docs" / "reliability.md",
    "fault",
    {
        "what": "fault",
        "happens": "what happens",
        "exit_code": "exit code",
        "kept": "kept",
        "noticed": "noticed",
    },
    """\
# What a fault does to a run

For those who decide whether to trust a long run to enginehouse. `make reliability` writes this page from tests: each
row is the text of a test that causes the fault.

| fault | what you lose |
|---|---|
| a replica, a reward process or a tracker fails | nothing: the run continues |
| an environment worker fails | nothing, unless `rollout.on_failure` is `fail`, the default: then the run ends |
| Ctrl-C, SIGTERM, SIGHUP, or Ray's control service dies | nothing but time: `--resume` continues |
| the run is killed, a rank of the actor dies, the disk is full | the steps since the last checkpoint |
| the newest checkpoint is damaged | the steps since the one before it |
| data, model or directory are not what they should be | nothing: the run does not start |

*Kept* is what you find afterwards. *Noticed* is how long it takes until the run says or does something about the fault.

Also tried by hand, once, on a CPU: kills at random moments with `train.staleness`, environment workers, PPO and two
ranks of `fsdp`, each resumed and compared; a clock that jumps by three days; few file descriptors; servers of rewards
that hang, lie or never end; 1,500 steps in a row. **Not covered**: GPUs, nodes on separate hosts, a power cut, memory
that really runs out, a stopped vLLM, resuming a killed run of `megatron`, trackers on a full disk, and two runs that
begin at the same moment.
""",
    "area",
    lists_tests=True,
)

BAD_PLUGINS = Page(
    ROOT / "docs" / "plugins" / "bad-plugins.md",
    "bad_plugin",
    {
        "what": "a plugin that",
        "listed": "is listed as",
        "found": "`enginehouse plugins doctor` says",
        "asked": "a config that names it",
    },
    """\
# Bad plugins, and what enginehouse says

For authors of a plugin that enginehouse rejects. First read
[the causes of each state](index.md#my-plugin-is-listed-as-broken-or-incompatible).
`make reliability` writes this page from `tests/testing/test_bad_plugins.py`.

In the table the plugin and its distribution are called `acme`. A config that names the plugin is *rejected* with an
error, or *works*: `plan` accepts it, and the fault appears only when the engine is used, if at all. If the import of a
plugin raises an error, calls `sys.exit` or takes 30 s, a command skips the plugin and loads the others.
""",
    rejected="asked",
)

PAGES = (FAULTS, BAD_PLUGINS)

if __name__ == "__main__":
    for page in PAGES:
        page.path.parent.mkdir(exist_ok=True)
        page.path.write_text(page.text(), encoding="utf-8")
