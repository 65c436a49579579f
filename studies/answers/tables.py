"""The tables of docs/studies/answers.md, drawn from results/answers-study.json into the marked places of the page.

A place is `<!-- table: NAME -->` … `<!-- end of table -->`; what stands around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MISSING = {"1": "one line", "2": "two lines", "all": "all of it", "every": "every item"}
STARTS = {"base": "as it comes", "warm": "after the warm start"}
NAMES = {
    "t5": "T⁵",
    "quiet-star-grpo": "GRPO",
    "rlp": "RLP",
    "quiet-star-ppo": "PPO, one critic",
    "anchor-only": "anchors alone",
}
FINAL = {"anchor.next_token": 0.3, "anchor.answers": True, "anchor.conditioned": 0.05}
"""The anchors that the comparison uses."""


def draw(page: str, found: dict[str, Any]) -> str:
    """The page with every marked place filled from the results."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]](found) + place[3], page)


def signed(value: float) -> str:
    """A gain with its sign and three decimals."""
    return f"{value:+.3f}".replace("-", "−")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def headroom(found: dict[str, Any]) -> str:
    """What thoughts are worth before training, by lines left out."""
    head = ("model", "left out", "items", "loss without", "own", "another's", "empty", "true working", "best of 16")
    rows = []
    for name, start in STARTS.items():
        for row in found["headroom"].get(name, ()):
            gains = (signed(row[key]) for key in ("own", "other", "empty", "true", "best16"))
            content = f"{signed(row['content'])} ± {row['content_error']:.3f}"
            known = (start, MISSING[row["missing"]], str(row["items"]), f"{row['l0']:.3f}")
            rows.append((*known, *gains, content, f"{row['right']:.0%}".replace("%", " %")))
    return _table((*head, "content gain ± s.e.", "right number written"), rows)


def _anchors(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: cell["settings"][key] for key in FINAL}


def compared(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells with the final anchors, in the order of the names."""
    cells = [cell for cell in found["cells"] if _anchors(cell) == FINAL]
    return sorted(cells, key=lambda cell: list(NAMES).index(cell["method"]))


def _with_interval(value: list[float]) -> str:
    return f"{signed(value[0])} ({signed(value[1])} … {signed(value[2])})"


def comparison(found: dict[str, Any]) -> str:
    """The last measurement of every cell with the final anchors."""
    head = ("method", "windows", "actor thoughts", "thought gain", "gain against the start", "content gain")
    rows = []
    for cell in compared(found):
        last = cell["measured"][-1]
        gains = (_with_interval(last[key]) for key in ("thought_gain", "gain_vs_base", "content_gain"))
        controls = (signed(last[key][0]) for key in ("other_gain", "empty_gain", "random_gain"))
        tail = (f"{last['no_thought_loss'][0]:.3f}", f"{last['mean_thought_length']:.0f}")
        rows.append(
            (NAMES[cell["method"]], str(last["window"]), f"{last['actor_thoughts']:,}", *gains, *controls, *tail)
        )
    return _table((*head, "another's", "empty", "random tokens", "loss without", "tokens of a thought"), rows)


def course(found: dict[str, Any]) -> str:
    """Every measurement of the cells with the final anchors: thought gain, gain against the start, content gain."""
    windows = sorted({one["window"] for cell in compared(found) for one in cell["measured"]})
    rows = []
    for measure, title in (
        ("thought_gain", "thought gain"),
        ("gain_vs_base", "gain against the start"),
        ("content_gain", "content gain"),
        ("no_thought_loss", "loss without a thought"),
    ):
        for cell in compared(found):
            at = {one["window"]: one[measure][0] for one in cell["measured"]}
            form = "{:.3f}".format if measure == "no_thought_loss" else signed
            values = tuple(form(at[window]) if window in at else "–" for window in windows)
            rows.append((title, NAMES[cell["method"]], *values))
    return _table(("", "method", *(f"window {window}" for window in windows)), rows)


def every(found: dict[str, Any]) -> str:
    """Every cell that was run, failed ones too."""
    head = ("next-token anchor", "answers in it", "conditioned anchor", "method", "rate", "η", "how far")
    rows = []
    for cell in sorted(found["cells"], key=lambda one: (one["settings"]["anchor.conditioned"] != 0.3, one["name"])):
        settings, last = cell["settings"], cell["measured"][-1]
        trained = last["window"] > 0
        shown = (signed(last[key][0]) if trained else "–" for key in ("thought_gain", "gain_vs_base", "content_gain"))
        eta = f"{settings['qualify.eta']:g}" if cell["method"] == "t5" else ""
        rows.append(
            (
                f"{settings['anchor.next_token']:g}",
                "yes" if settings["anchor.answers"] else "no",
                f"{settings['anchor.conditioned']:g}",
                NAMES[cell["method"]],
                f"{settings['optimizer.lr']:g}",
                eta,
                cell["status"],
                *shown,
                f"{last['no_thought_loss'][0]:.3f}" if trained else "–",
            )
        )
    return _table((*head, "thought gain", "gain against the start", "content gain", "loss without"), rows)


def critics(found: dict[str, Any]) -> str:
    """Held-out R² of T⁵'s critics and the policy's movement, window by window, in the cell with the final anchors."""
    rows = []
    for cell in compared(found):
        if cell["method"] == "t5":
            for one in cell["windows"]:
                moved = (f"{one['policy_kl']:.3f}", f"{one['clip_fraction']:.1%}".replace("%", " %"))
                rows.append((str(one["window"]), signed(one["r2.1"]), signed(one["r2.2"]), *moved))
    return _table(("window", "R² of critic 1", "R² of critic 2", "policy KL", "tokens clipped"), rows)


TABLES = {"headroom": headroom, "comparison": comparison, "course": course, "every": every, "critics": critics}
