"""Writes docs/figures/thought-gain.svg, the picture of the README: a text, a hidden thought at a position, its gain.

    python docs/tools/thought_gain.py

Colours are readable on light and dark backgrounds; the bars are a sketch, not a measurement.
"""

from __future__ import annotations

from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "figures" / "thought-gain.svg"
INK, THOUGHT, PLAIN = "#57606a", "#0f766e", "#b45309"
FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"
MONO = "font-family='ui-monospace, Menlo, Consolas, monospace'"

LEFT = 210
"""Where the bars begin."""

BELOW = (
    "Two critics learn to predict the gain. Once they do so on unseen texts, their advantages are mixed,",
    "the mix is calibrated and checked on texts of its own, and PPO teaches the model to think better.",
)


def text(x: float, y: float, content: str, *, fill: str = INK, size: int = 15, font: str = FONT, more: str = "") -> str:
    """One line of text at (x, y)."""
    return f"<text x='{x}' y='{y}' fill='{fill}' font-size='{size}' {font} {more}>{content}</text>"


def box(x: float, y: float, width: float, fill: str, dashed: bool = False, height: float = 34) -> str:
    """A rounded frame with a tint of its colour."""
    dashes = " stroke-dasharray='5 4'" if dashed else ""
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='7' fill='{fill}' fill-opacity='0.12' "
        f"stroke='{fill}'{dashes}/>"
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str, arrow: bool = False) -> str:
    """A straight line, with a head where asked."""
    head = f" marker-end='url(#{'thought' if colour == THOUGHT else 'ink'})'" if arrow else ""
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{colour}' stroke-width='1.6'{head}/>"


def bar(y: float, width: float, colour: str, label: str) -> str:
    """A loss as a bar, with what it is."""
    return f"<rect x='{LEFT}' y='{y}' width='{width}' height='16' rx='3' fill='{colour}'/>" + text(
        LEFT + width + 8, y + 13, label, fill=colour, size=13
    )


def marker(name: str, colour: str) -> str:
    """An arrow head."""
    return (
        f"<marker id='{name}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0 L8 4 L0 8 z' fill='{colour}'/></marker>"
    )


def picture() -> str:
    """The whole drawing."""
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 860 316' role='img' aria-labelledby='title'>",
        "<title id='title'>A hidden thought at position p lowers the loss of the text that follows</title>",
        f"<defs>{marker('thought', THOUGHT)}{marker('ink', INK)}</defs>",
        text(20, 30, "plain text", size=13),
        box(20, 40, 446, INK),
        text(34, 62, "37 boxes of 48 pencils each, which makes", font=MONO),
        box(486, 40, 354, INK),
        text(500, 62, "1776 pencils, and the next …", font=MONO),
        text(486, 30, "the next H tokens judge the thought", size=13),
        text(472, 24, "p", fill=THOUGHT, more="font-style='italic'"),
        line(476, 30, 476, 108, THOUGHT, arrow=True),
        text(20, 132, "hidden thought", fill=THOUGHT, size=13),
        box(360, 110, 190, THOUGHT, dashed=True),
        text(386, 132, "( 1480 + 296 )", fill=THOUGHT, font=MONO),
        line(550, 120, 620, 78, THOUGHT, arrow=True),
        text(566, 132, "sampled, read, never shown", fill=THOUGHT, size=13),
        text(20, 196, "loss of the next H tokens", size=13),
        bar(184, 210, PLAIN, "without the thought"),
        bar(208, 128, THOUGHT, "with the thought"),
        line(LEFT + 128, 236, LEFT + 210, 236, INK),
        line(LEFT + 128, 230, LEFT + 128, 242, INK),
        line(LEFT + 210, 230, LEFT + 210, 242, INK),
        text(LEFT + 218, 241, "gain = reward"),
        *(text(20, 282 + 22 * place, sentence) for place, sentence in enumerate(BELOW)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(picture(), encoding="utf-8")
