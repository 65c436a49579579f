"""Cells of the study of thoughts before answers that nobody ran, with numbers one can reckon with by hand."""

from __future__ import annotations

from typing import Any


def made_up(method: str, seed: int, gain: float, **more: Any) -> dict[str, Any]:
    """A cell that gains the same on every text, and so much in every window."""
    settings = {"run.seed": seed, "window.items": 8, "group": 1, "optimizer.lr": 1e-5}
    course = [
        {"window": w, "steps": 4 * w, "actor_thoughts": 8 * w, "training_seconds": 10.0 * w * more.get("slow", 1)}
        | {name: [gain * w, 0, 0] for name in ("thought_gain", "gain_vs_base", "content_gain", "no_thought_loss")}
        for w in range(more.get("windows", 2) + 1)
    ]
    test = {name: [gain] for name in ("thought_gain", "gain_vs_base", "content_gain", "no_thought_loss")}
    return {
        "name": f"{method}-{seed}", "method": method, "start": "careful", "code": "now", "status": "2 windows",
        "settings": settings, "measured": course, "windows": more.get("critics", []), "test": test,
        "by_text": {"digest": "d", "items": "1 3", "thought_gain": f"{round(1e4 * gain)} {round(3e4 * gain)}"},
    }  # fmt: skip


def lines_of(table: str) -> list[list[str]]:
    """The rows of a table without its head, cell by cell."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def clocked(method: str, seconds: float, gain: float, seed: int = 1, **more: Any) -> dict[str, Any]:
    """A cell that a clock ended, measured on test texts and on three answers of two problems."""
    cell = made_up(method, seed, gain, **more)
    cell["settings"] |= {"run.seconds": seconds}
    cell["measured"] = [{"thoughts": 9.0, **one} for one in cell["measured"]]
    cell["test"] = {name: [gain, gain - 0.1, gain + 0.1] for name in cell["test"]} | {"mean_thought_length": 40.0}
    cell["test_start"] = {"thought_gain": 0.1, "content_gain": 0.2, "no_thought_loss": 1.0}
    cell["by_text"] |= {"gain_vs_base": cell["by_text"]["thought_gain"]}
    own = more.get("own", "110")
    cell["accuracy"] = {"problems": "test", "verdicts": {"own": own, "sampled": "000"}}
    return cell
