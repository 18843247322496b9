"""`make contract`: write down what plugins may count on: `surface.json`, docs/contract.md, what `plugins doctor` reads.

What would break plugins is refused, but for the addresses given (patterns, as of a shell) that are said to break none:
`python -m tools.contract enginehouse.engines.Mesh.of`.
"""

import json
import sys
from fnmatch import fnmatchcase

from tools.contract.page import PAGE, page
from tools.contract.surface import PROMISED, RAISED, SNAPSHOT, entry_of, kept, problem, promised, snapshot_of, surface


def main(accepted: list[str]) -> str:
    """Write both; returns why not."""
    before, today = kept(), surface()
    names = before.get("names", {})
    for address in [one for one in {**names, **today} if any(fnmatchcase(one, given) for given in accepted)]:
        since = names.pop(address, {"since": before["published"]})["since"]
        if address in today:
            names[address] = {"since": since} | entry_of(today[address])
    if before and (wrong := problem(before, today)) not in ("", RAISED):
        return wrong
    now = snapshot_of(today, kept())
    SNAPSHOT.write_text(json.dumps(now, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(now), encoding="utf-8")
    PROMISED.write_text(promised(today), encoding="utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or None)
