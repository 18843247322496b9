"""Draw the pictures of README.md and docs/architecture.md, as SVG narrow enough for a phone.

python -m tools.pictures        # writes docs/pictures/*.svg
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 420
BLUE, GREEN, SAND, ROSE = "#dbe7fb", "#dcf1e1", "#f6ecd2", "#f8dfe0"


class Ink(NamedTuple):
    """The colours of text, sheet and lines."""

    text: str = "#1f2430"
    paper: str = "#ffffff"
    line: str = "#6b7280"


DARK_ON_WHITE = Ink()


class Picture:
    """Boxes, lines of text and arrows on a sheet that grows downwards."""

    def __init__(self, title: str, ink: Ink = DARK_ON_WHITE, width: int = WIDTH):
        self.title = title
        self.ink = ink
        self.width = width
        self.height = 0
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, size: int = 13, weight: int = 400, anchor: str = "middle") -> None:
        """Write one line, its baseline at `y`."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
            f'fill="{self.ink.text}">{escape(words)}</text>'
        )
        self.height = max(self.height, round(y) + 8)

    def box(self, x: float, y: float, width: float, name: str, says: tuple[str, ...], fill: str) -> float:
        """Draw a box as high as its text; return where it ends."""
        height = 14 + 17 * (1 + len(says))
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="6" fill="{fill}" '
            f'stroke="{self.ink.line}"/>'
        )
        self.text(x + width / 2, y + 20, name, 14, 600)
        for number, line in enumerate(says):
            self.text(x + width / 2, y + 37 + 17 * number, line, 12)
        self.height = max(self.height, round(y) + height + 10)
        return y + height

    def frame(self, centre: float, y: float, width: float, height: float, fill: str, *, dashed: bool = False) -> None:
        """Draw an empty box around the vertical line at `centre`."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{centre - width / 2:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" '
            f'stroke="{self.ink.line}"{dashes}/>'
        )

    def row(self, y: float, boxes: list[tuple[str, tuple[str, ...]]], fill: str, gap: float = 8) -> float:
        """Draw boxes side by side over the whole width; return where they end."""
        width = (WIDTH - 20 - gap * (len(boxes) - 1)) / len(boxes)
        ends = [self.box(10 + at * (width + gap), y, width, *box, fill) for at, box in enumerate(boxes)]
        return max(ends)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow from one point to another."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{self.ink.line}" stroke-width="1.6" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """Return the whole file."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{self.ink.line}"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" '
                f'height="{self.height}" role="img" font-family="system-ui, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<defs>{head}</defs>",
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{self.ink.paper}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def house() -> Picture:
    """Draw the two storeys, core's packages and their imports, and the plugins below the contracts."""
    picture = Picture(
        "The two storeys of enginehouse: each row may import those below it; plugins stand on the contracts"
    )
    middle = WIDTH / 2
    picture.text(middle, 24, "the trainer: distributions that stand on core", 13, 600)
    y = 36.0
    trainer: list[list[tuple[str, tuple[str, ...]]]] = [
        [("recipes", ("init, ready configs",)), ("report", ("pages of runs",)), ("testing", ("suites",))],
        [("rl", ("commands, config, plan, the loop,", "advantages, losses, episodes, runs"))],
        [("rewards", ("functions in processes",))],
    ]
    for row in trainer:
        y = picture.row(y, row, SAND) + 8
    y += 18
    picture.text(middle, y, "core: each row may import those below it", 13, 600)
    y += 12
    rows: list[list[tuple[str, tuple[str, ...]]]] = [
        [("cli", ("plugins, runtime",)), ("library", ("a loop of yours",)), ("roles", ("workers, placement",))],
        [("fleet", ("rollout replicas",)), ("weights", ("verified updates",))],
        [("controller", ("worker groups, Ray",))],
    ]
    for row in rows:
        y = picture.row(y, row, BLUE) + 8
    y = picture.row(y, [("engines", ("the contracts: train, rollout,", "environment, weights"))], GREEN) + 8
    y = (
        picture.row(y, [("data", ("Batch",)), ("runtimes", ("Python envs",)), ("plugin", ("hooks, records",))], GREEN)
        + 26
    )
    for x in (70, 210, 350):
        picture.arrow(x, y + 14, x, y - 22)
    y += 32
    picture.text(middle, y - 6, "engines, found when a command runs; yours too", 13, 600)
    y = picture.row(y + 4, [("torch", ("train, rollout",)), ("fsdp", ("train",)), ("megatron", ("train",))], SAND) + 8
    y = picture.row(y, [("vllm", ("rollout",)), ("sglang", ("rollout",))], SAND)
    return picture


def step() -> Picture:
    """Draw one step of a run, from prompts to served weights."""
    picture = Picture("One step: generate, score, judge, update, and weights verified before they are served")
    steps: list[tuple[str, tuple[str, ...], str]] = [
        ("feed", ("begins tasks, as far ahead", "as train.staleness allows"), BLUE),
        ("generate", ("the rollout fleet answers: tokens,", "their logprobs and weight versions"), SAND),
        ("rewards", ("in separate processes,", "with a deadline, as samples end"), BLUE),
        ("scores and logprobs", ("reward model, reference, critic,", "if an advantage or a loss needs them"), SAND),
        ("advantage", ("of whole groups of samples",), BLUE),
        ("update", ("each rank trains on its rows;", "the next step begins meanwhile"), SAND),
        ("sync", ("stage new weights beside the old,", "compare checksums, switch the version,", "read it back"), ROSE),
    ]
    y = 12.0
    left, width = 24.0, 316.0
    middles = []
    for number, (name, says, fill) in enumerate(steps):
        end = picture.box(left, y, width, f"{number + 1}. {name}", says, fill)
        middles.append((y + end) / 2)
        if number < len(steps) - 1:
            picture.arrow(left + width / 2, end, left + width / 2, end + 18)
        y = end + 18
    side = left + width + 44
    picture.parts.append(
        f'<path d="M{left + width} {middles[-1]:g}H{side}V{middles[1]:g}H{left + width + 8}" fill="none" '
        f'stroke="{picture.ink.line}" stroke-width="1.6" marker-end="url(#head)"/>'
    )
    across = side + 16
    turned = (middles[-1] + middles[1]) / 2
    picture.parts.append(
        f'<text x="{across:g}" y="{turned:g}" font-size="12" text-anchor="middle" fill="{picture.ink.text}" '
        f'transform="rotate(90 {across:g} {turned:g})">verified weights, to every replica</text>'
    )
    return picture


class Scheme(NamedTuple):
    """The colours of the README's picture, light or dark."""

    ink: Ink
    step: str
    socket: str
    plug: str
    verified: str


LIGHT = Scheme(DARK_ON_WHITE, BLUE, "#f4f6f9", SAND, GREEN)
DARK = Scheme(Ink("#e6edf3", "#12171e", "#8b949e"), "#1f3a5f", "#1b222c", "#4d3f1c", "#1c4630")


def loop(scheme: Scheme = LIGHT) -> Picture:
    """Draw the training loop with its two sockets, readable when it is shrunk to a phone's width."""
    picture = Picture(
        "Prompts go to a rollout engine, responses to a reward, and scored responses to a training engine; its new "
        "weights are verified before the rollout engine uses them. A controller runs the loop.",
        scheme.ink,
        width=540,
    )
    left, middle, right, top = 90, 270, 450, 90
    for centre, name, engines in (
        (left, "Rollout engine", ("vLLM", "SGLang", "torch", "yours")),
        (right, "Training engine", ("FSDP", "Megatron", "torch", "yours")),
    ):
        picture.frame(centre, top, 160, 236, scheme.socket)
        picture.text(centre, top + 30, name, 16, 600)
        for number, engine in enumerate(engines):
            y = top + 48 + 46 * number
            picture.frame(centre, y, 130, 36, scheme.plug if engine != "yours" else "none", dashed=engine == "yours")
            picture.text(centre, y + 24, engine, 17)
    for centre, y, height, fill, lines in (
        (left, 12, 42, scheme.step, ("prompts",)),
        (right, 12, 42, scheme.step, ("trained model",)),
        (middle, top, 62, scheme.step, ("reward", "your function")),
        (middle, top + 87, 62, "none", ("controller", "runs the loop")),
        (middle, top + 174, 62, scheme.verified, ("weight update", "verified")),
    ):
        picture.frame(centre, y, 150, height, fill)
        for number, line in enumerate(lines):
            picture.text(centre, y + 27 + 23 * number, line, 16, 400 if number else 600)
    for begin, end in (
        ((left, 54), (left, top)),
        ((left + 80, top + 31), (middle - 75, top + 31)),
        ((middle + 75, top + 31), (right - 80, top + 31)),
        ((right - 80, top + 205), (middle + 75, top + 205)),
        ((middle - 75, top + 205), (left + 80, top + 205)),
        ((right, top), (right, 54)),
    ):
        picture.arrow(*begin, *end)
    for x, y, to_x, to_y in (
        (left + 80, top + 118, middle - 75, top + 118),
        (middle + 75, top + 118, right - 80, top + 118),
        (middle, top + 62, middle, top + 87),
        (middle, top + 149, middle, top + 174),
    ):
        picture.parts.append(
            f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{scheme.ink.line}" stroke-width="1.6" stroke-dasharray="3 4"/>'
        )
    picture.height = top + 248
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "house.svg": house,
    "step.svg": step,
    "loop.svg": loop,
    "loop-dark.svg": lambda: loop(DARK),
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg())
