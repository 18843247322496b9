"""Makes the pictures of the report in docs/watching.md from existing runs.

    python -m benchmarks.report_pictures RUN OTHER CHAT

RUN and OTHER are side by side in one picture; CHAT has samples of several turns.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from benchmarks.chromium import Chromium
from enginehouse_report.page import write_report

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SETTLED_SECONDS = 1.0
COLORS = 240
"""A picture with fewer colours is a quarter of the size."""
SAMPLE = """
samplesTable.kind.value = "0";
samplesTable.select();
samplesTable.sortBy({ name: "step" });
openSample(0, samplesTable.order.find((row) => samplesTable.samples.columns.get("step")[row] > 1));
"""
ADVANTAGE = """
(() => {
  const choice = document.querySelector("#sample select");
  choice.value = "advantage";
  choice.dispatchEvent(new Event("change"));
  const token = document.querySelector("[data-at]:not(.other)");
  token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
})()
"""


def main(run: str, other: str, chat: str) -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        one, two, turns = (Path(folder) / f"{name}.html" for name in ("one", "two", "turns"))
        write_report([Path(run)], one)
        write_report([Path(run), Path(other)], two)
        write_report([Path(chat)], turns)

        def picture(
            name: str, page: Path, *acts: str, width: int = 1280, height: int = 1000, dark: bool = False
        ) -> None:
            browser.shape(width, height, dark=dark, phone=width < 600)
            browser.open(page.as_uri())
            for act in acts:
                browser.evaluate(act)
                time.sleep(SETTLED_SECONDS)
            _save(browser, name)

        picture("report-desktop", one, "scrollTo(0, 0)")
        picture("report-tokens", turns, SAMPLE, ADVANTAGE, height=860)
        picture(
            "report-phone", one, "document.querySelector('#charts').scrollIntoView()", width=390, height=844, dark=True
        )
        picture("report-two-runs", two, "scrollTo(0, 0)", height=760, dark=True)


def _save(browser: Chromium, name: str) -> None:
    """Save the visible part as a small PNG."""
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        browser.photograph(Path(file.name))
        picture = Image.open(io.BytesIO(Path(file.name).read_bytes())).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
