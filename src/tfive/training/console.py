"""What a person sees of a training run: a line per event, a table row per window, a summary with its controls."""

from __future__ import annotations

import sys
from typing import Any

from tfive.methods.registry import spec_of
from tfive.printable import printable

COLUMNS = (
    ("window", "window", "d"),
    ("R² 1", "r2.0", ".2f"),
    ("R² 2", "r2.1", ".2f"),
    ("Ĉ/Q̂", "retention", ".4f"),
    ("gain", "development.thought_gain", "+.3f"),
    ("content", "development.content_gain", "+.3f"),
    ("vs base", "development.gain_vs_base", "+.3f"),
    ("mixed", "development.mixed_gain", "+.4f"),
    ("ℓ₀ drift", "development.no_thought_drift", "+.4f"),
    ("KL", "policy_kl_last", ".4f"),
    ("clip", "clip_fraction", ".3f"),
    ("length", "development.mean_thought_length", ".1f"),
)

LEGEND = (
    "gains in nats a token on development texts, in windows that measure them (above 0 is better); words: "
    "docs/explanation/glossary.md",
    "R² 1, R² 2: what each critic foresees of the return on fresh texts; Ĉ/Q̂: how far the learned mixture of the two "
    "leaves their average, at most calibration.kappa",
    "ℓ₀ drift: loss without a thought, minus the base model's; KL, clip: how far the policy moved, share of tokens "
    "that were clipped; length: tokens of a thought",
)
"""What the columns are, said once before the first row."""

LEARNS = {"actor": "the actor", "critic_fit": "the critics (one fit a window)"}
"""Roles that learn from training texts, in words."""


class Console:
    """Writes to standard error, so that `--json` on standard output stays clean. Writes nothing when quiet."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._rows = 0

    def say(self, line: str) -> None:
        """One line."""
        if not self.quiet:
            # Looked up at every call: while a progress bar is drawn, rich puts its own stream there.
            print(printable(line), file=sys.stderr, flush=True)

    def draws(self, draws: dict[str, float], windows: int, *, clock: bool) -> None:
        """How often the run will draw a text, before it begins; above once, a model begins to know its texts. `draws`
        are those of one window; where a clock may end the run before its last, they are told as such."""
        if not draws:
            return
        most, many = max(draws.values()), 1 if clock else windows
        times = ", ".join(f"{many * count:.2f} times for {LEARNS[role]}" for role, count in draws.items())
        again = "; warning: texts come again, raise text.sequences.train or run fewer windows"
        if clock:
            again = f"; texts come again after about {1 / most:.0f} windows, raise text.sequences.train to put that off"
        beginning = "each window draws a training text" if clock else "each training text is drawn"
        self.say(f"{beginning} {times}{again if windows * most > 1 else ''}")

    def event(self, what: str, detail: str) -> None:
        """A transition of the method."""
        self.say(f"  {what}: {detail}")

    def window(self, report: dict[str, Any]) -> None:
        """One row of the table; the heading comes again every twenty rows. Gains are those of development texts."""
        if self._rows == 0:
            for line in LEGEND:
                self.say(line)
        if self._rows % 20 == 0:
            self.say("  ".join(f"{title:>8}" for title, _, _ in COLUMNS))
        self._rows += 1
        self.say("  ".join(f"{_show(_find(report, path), form):>8}" for _, path, form in COLUMNS))

    def summary(self, summary: dict[str, Any]) -> None:
        """Every gain on test texts before and after training, beside its controls: an empty thought, random tokens."""
        low, high = summary["test_content_gain_interval"]
        windows = "1 window" if summary["windows"] == 1 else f"{summary['windows']} windows"
        self.say("")
        for problem in summary["problems"]:
            self.say(f"DO NOT USE THESE NUMBERS: {problem}")
        if summary.get("note"):
            self.say(f"note: {summary['note']}")
        self.say(f"{windows}, {summary['seconds']:.0f} s, {summary['generated_tokens']:,} thought tokens")
        self.say(f"test texts, nats per token (positive is better), {summary['reading']} reading of thoughts")
        for title, line in (
            ("thought gain", f"{summary['test_thought_gain_start']:+.4f} → {summary['test_thought_gain_end']:+.4f}"),
            *_on_trained_texts(summary),
            (
                "content gain",
                f"{summary['test_content_gain_start']:+.4f} → {summary['test_content_gain_end']:+.4f}"
                f"  (95 % interval {low:+.4f} … {high:+.4f})",
            ),
            ("gain over the base model", f"{summary['test_gain_vs_base_end']:+.4f}"),
            ("an empty thought instead", f"{summary['test_empty_gain_end']:+.4f}"),
            ("random tokens instead", f"{summary['test_random_gain_end']:+.4f}"),
            (
                "loss without a thought",
                f"{summary['test_no_thought_loss_start']:.4f} → {summary['test_no_thought_loss_end']:.4f}",
            ),
        ):
            self.say(f"  {title:<26}{line}")
        if summary.get("reading_openness") is not None:
            self.say(f"  {'reading gates':<26}open by {summary['reading_openness']:.3f} of 1, mean over heads")
        if summary["test_mixed_gain_end"] is not None:
            low, high = summary["test_mixed_gain_interval"]
            self.say(
                f"  {'mixed gain':<26}{summary['test_mixed_gain_end']:+.4f}  (95 % interval {low:+.4f} … {high:+.4f}; "
                f"constant gate {summary['test_mixed_gain_constant']:+.4f}, another's thought "
                f"{summary['test_mixed_gain_other']:+.4f})"
            )
            mean, deviation = summary["test_mean_gate"], summary["test_gate_deviation"]
            self.say(f"  {'gate':<26}mean {mean:.3f}, deviation {deviation:.3f}")


def _on_trained_texts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What the last window's own thoughts gained, beside how often their texts were drawn: far above the gain on texts
    that nothing trained on, it is learned by heart. One token's (RLP) is no match for the others."""
    gain, times = summary.get("actor_gain"), summary["draws"].get("actor")
    if gain is None or times is None or spec_of(summary["method"]).scoring == "next_token":
        return []
    told = f"{gain:+.4f}  (last window, before its updates; texts drawn {times:.2g} times)"
    return [("on texts it trained on", told)]


def _find(report: dict[str, Any], path: str) -> Any:
    value: Any = report
    for part in path.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
    return value


def _show(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
