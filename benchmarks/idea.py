"""Draws `docs/img/idea.svg`, the picture of the README: `python -m benchmarks.idea`."""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).parents[1] / "docs/img/idea.svg"
WIDTH, HEIGHT = 860, 390
INK, PAPER, SOFT = "#1f2933", "#ffffff", "#f1f4f8"
DEVICES = (("kiel", "#c2410c"), ("lund", "#0f766e"), ("oslo", "#4338ca"))  # name of a site, and colour of its model
FONT = "font-family='Helvetica, Arial, sans-serif'"


def text(x: float, y: float, words: str, size: int = 14, weight: str = "normal", colour: str = INK) -> str:
    return (
        f"<text x='{x}' y='{y}' {FONT} font-size='{size}' font-weight='{weight}' fill='{colour}' text-anchor='middle'>"
        f"{words}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str = SOFT, line: str = INK) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='10' fill='{fill}' stroke='{line}' stroke-width='1.5'/>"


def arrow(x: float, y1: float, y2: float, colour: str) -> str:
    back = y2 + (10 if y1 > y2 else -10)  # point at which the arrow's tip begins
    line = f"<line x1='{x}' y1='{y1}' x2='{x}' y2='{back}' stroke='{colour}' stroke-width='3'/>"
    return f"{line}<path d='M{x - 7} {back} L{x + 7} {back} L{x} {y2} z' fill='{colour}'/>"


def device(middle: float, name: str, colour: str) -> list[str]:
    """Draw a site: its data, which stay there, its own model, and weights in both directions."""
    return [
        arrow(middle - 22, 222, 136, INK),
        arrow(middle + 22, 132, 218, colour),
        box(middle - 115, 225, 230, 118),
        text(middle, 249, name, 16, "bold"),
        box(middle - 100, 262, 92, 64, PAPER),
        text(middle - 54, 290, "its data"),
        text(middle - 54, 309, "stay here", 12),
        box(middle + 8, 262, 92, 64, PAPER, colour),
        text(middle + 54, 290, "a model", colour=colour),
        text(middle + 54, 309, "of its own", 12, colour=colour),
    ]


def svg() -> str:
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>",
        "<title>Data stay on the devices; weights go to the server, and each device gets weights made for it</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='{PAPER}'/>",
        box(110, 22, 640, 105),
        text(WIDTH / 2, 54, "server", 16, "bold"),
        text(WIDTH / 2, 80, "sees weights, never data"),
        text(WIDTH / 2, 104, "makes for each device what fits that device"),
        text(80, 170, "weights of", 13),
        text(80, 188, "the last training", 13),
        text(780, 170, "weights", 13),
        text(780, 188, "for this device", 13),
    ]
    for middle, (name, colour) in zip((180, 430, 680), DEVICES, strict=True):
        parts += device(middle, name, colour)
    parts += [
        text(WIDTH / 2, 374, "hospitals, phones, machines: everybody asks a similar question about different data", 13),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUT.write_text(svg(), encoding="utf-8")
