"""`make contract`: write `surface.json`, the pages in docs/contract/ and the file that `plugins doctor` reads.

It rejects a change that would break plugins. To accept a change that breaks no plugin, give the import path of the name
(or a pattern, as in a shell): `python -m tools.contract enginehouse.engines.Mesh.of`.
"""

import json
import sys
from fnmatch import fnmatchcase

from tools.contract.page import FOLDER, pages
from tools.contract.surface import PROMISED, RAISED, SNAPSHOT, entry_of, kept, problem, promised, snapshot_of, surface


def main(accepted: list[str]) -> str:
    """Write the files. Return the reason why they cannot be written, or an empty text."""
    before, today = kept(), surface()
    names = before.get("names", {})
    addresses = [name for name in {**names, **today} if any(fnmatchcase(name, pattern) for pattern in accepted)]
    for address in addresses:
        since = names.pop(address, {"since": before["published"]})["since"]
        if address in today:
            names[address] = {"since": since} | entry_of(today[address])
    if before and (wrong := problem(before, today)) not in ("", RAISED):
        return wrong
    now = snapshot_of(today, kept())
    SNAPSHOT.write_text(json.dumps(now, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.md"):
        path.unlink()
    for path, text in pages(now).items():
        path.write_text(text, encoding="utf-8")
    PROMISED.write_text(promised(today), encoding="utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or None)
