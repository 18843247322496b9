"""The pictures of plugins/report/README.md, of runs that are here: `python -m benchmarks.report_pictures RUN OTHER`."""

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
COLORS = 96
"""A picture of fewer colours is a quarter of the size."""
SAMPLE = """
samplesTable.kind.value = "0";
samplesTable.select();
samplesTable.sortBy({ name: "reward", number: true });
openSample(0, samplesTable.order[Math.floor(samplesTable.order.length / 2)]);
"""
ADVANTAGE = """
const choice = document.querySelector("#sample select");
choice.value = "advantage";
choice.dispatchEvent(new Event("change"));
document.querySelector("[data-at='9']").dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
"""


def main(run: str, other: str) -> None:
    """Write them all."""
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        one, two = Path(folder) / "one.html", Path(folder) / "two.html"
        write_report([Path(run)], one)
        write_report([Path(run), Path(other)], two)

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
        picture("report-tokens", one, SAMPLE, ADVANTAGE, height=620)
        picture(
            "report-phone", one, "document.querySelector('#charts').scrollIntoView()", width=390, height=844, dark=True
        )
        picture("report-two-runs", two, "scrollTo(0, 0)", height=760, dark=True)


def _save(browser: Chromium, name: str) -> None:
    """What is to be seen, as a small PNG."""
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        browser.photograph(Path(file.name))
        picture = Image.open(io.BytesIO(Path(file.name).read_bytes())).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
