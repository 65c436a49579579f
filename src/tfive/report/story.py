"""The top of a page: three numbers a stranger understands, each with its interval and its control, and a verdict.

The verdict cannot flatter: useful thoughts were learned only where the whole 95 % interval of every one of four numbers
lies above zero: the gain of a thought, its gain over another text's thought, its gain over the model before training,
and the growth of that last one since the start. (The gain over another text's thought may fall while thoughts get more
useful: a model that trusts any thought is hurt most by a foreign one.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfive.report.record import RunRecord
from tfive.report.sections import HOLD, number
from tfive.report.statistics import mean_interval, student_widening

UNIT = "nats per token"

Number = dict[str, Any]


def three_numbers(first: Number, last: Number, horizon: int | None, *, gated: bool = False) -> list[Number]:
    """Prediction, content and harm, from the first and the last measurement (means, and `…_interval` pairs); `gated`:
    text reads thoughts through gates."""
    if last.get("thought_gain") is None:
        return []
    following = f"each of the {horizon} tokens that follow" if horizon else "each token that follows"
    gain, other, content = last["thought_gain"], last.get("other_gain"), last.get("content_gain")
    drift = last.get("no_thought_drift")
    numbers = [
        _number("prediction", "thought_gain", "How much better is the text after a thought predicted?", first, last)
        | {
            "control": _control("an empty thought in its place", "empty_gain", last),
            "sentence": f"After its own thought the model gives {following} on average {_times(gain)} the probability "
            f"it gives without one; with an empty thought, {_times(last.get('empty_gain'))}."
            + _versus_base(last, first["window"] == last["window"]),
            "good": _above(last, "thought_gain"),
        },
        _number("content", "content_gain", "Does it matter what the thought says?", first, last)
        | {
            "control": _control("another text's thought in its place", "other_gain", last),
            "sentence": f"Its own thought is worth {_signed(content)} more than a thought about another text, which "
            f"is worth {_signed(other)}: only this difference comes from what the thought says.",
            "good": _above(last, "content_gain"),
        },
        _number("harm", "no_thought_drift", "Did the loss without a thought rise?", first, last)
        | {
            "control": {"title": "the base model's own loss", "metric": "no_thought_loss"}
            | dict(zip(("value", "low", "high"), (_base_loss(last), None, None))),
            "sentence": f"Without a thought its loss is {_changed(drift)} the base model's on the same text "
            f"(more than {HOLD} higher would count as harm)." + _worst_thought(last) + _gates(last, gated),
            "good": _held(last),
        },
    ]
    return [one for one in numbers if one["value"] is not None]


def _number(kind: str, metric: str, title: str, first: Number, last: Number) -> Number:
    low, high = _ends(last, metric)
    start = first.get(metric) if first["window"] != last["window"] else None
    value = last.get(metric)
    return {"id": kind, "metric": metric, "title": title, "unit": UNIT, "value": value, "low": low, "high": high} | {
        "start": start
    }


def _control(title: str, metric: str, last: Number) -> Number:
    low, high = _ends(last, metric)
    return {"title": title, "metric": metric, "value": last.get(metric), "low": low, "high": high}


def _ends(found: Number, metric: str) -> tuple[float | None, float | None]:
    low, high = found.get(f"{metric}_interval") or (None, None)
    return low, high


def _above(found: Number, metric: str) -> bool | None:
    """Whether a number is above zero beyond doubt; None where its interval holds zero or is not known."""
    low, high = _ends(found, metric)
    if low is None or high is None:
        return None
    # Intervals of a measurement are normal ones; few texts ask for Student's.
    wider = student_widening(int(found["texts"])) if found.get("texts") else 1.0
    middle = (low + high) / 2
    return True if middle - wider * (middle - low) > 0 else False if middle + wider * (high - middle) < 0 else None


def _held(found: Number) -> bool | None:
    low, high = _ends(found, "no_thought_drift")
    if low is None or high is None:
        return None
    return True if high <= HOLD else False if low > HOLD else None


def _signed(value: float | None) -> str:
    """A gain with a true minus sign."""
    return number(value).replace("-", "−")


def _times(gain: float | None) -> str:
    """A gain in nats as the factor it puts on a token's probability."""
    return "an unknown factor of" if gain is None else f"{math.exp(min(gain, 20.0)):.2f} times"


def _base_loss(last: Number) -> float | None:
    loss, drift = last.get("no_thought_loss"), last.get("no_thought_drift")
    return None if loss is None or drift is None else loss - drift


def _changed(drift: float | None) -> str:
    return "not comparable with" if drift is None else f"{abs(drift):.4f} {'above' if drift > 0 else 'below'}"


PUT_IN_PLACE = {
    "thought_gain": "its own thought",
    "other_gain": "another text's thought",
    "empty_gain": "an empty thought",
    "random_gain": "random tokens",
}
"""What is measured in a thought's place."""


def _worst_thought(last: Number) -> str:
    """How far a thought can spoil a prediction: the least of what was measured in a thought's place."""
    known = {name: last[name] for name in PUT_IN_PLACE if last.get(name) is not None}
    if len(known) < 2:
        return ""
    least = min(known, key=lambda name: known[name])
    what, gain = PUT_IN_PLACE[least], _signed(known[least])
    if known[least] >= 0:
        return f" Nothing put in a thought's place does harm on average; least good is {what} ({gain})."
    return f" Of what was put in a thought's place {what} does most harm: {gain}."


def _gates(last: Number, gated: bool) -> str:
    """Why thoughts cannot harm where they are read through gates, and how far those are open."""
    if not gated:
        return ""
    openness = last.get("reading_openness")
    now = "" if openness is None else f" They are open by {openness:.3f} of 1 now."
    return f" Thoughts are read through gates: shut, as they begin, no thought changes a prediction.{now}"


def _versus_base(last: Number, before: bool) -> str:
    low, high = _ends(last, "gain_vs_base")
    if before or last.get("gain_vs_base") is None:
        return ""
    ends = "" if low is None or high is None else f" ({_signed(low)} … {_signed(high)})"
    gain = _signed(last["gain_vs_base"])
    return f" Against the model before training, which does not think, the gain is {gain}{ends}."


def growth(record: RunRecord) -> Number | None:
    """How much the gain over the model before training has grown since the start, item by item on the same texts; None
    where it is unknown."""
    history = record.history
    if len(history) < 2:
        return None
    first, last = (record.items(one["window"]) for one in (history[0], history[-1]))
    if "gain_vs_base" not in first or "gain_vs_base" not in last or len(first["text"]) != len(last["text"]):
        return None
    change_I = last["gain_vs_base"].astype(np.float64) - first["gain_vs_base"].astype(np.float64)
    if len(np.unique(last["text"])) < 2:
        return None
    found = mean_interval(change_I[None], last["text"])
    return {"growth": found.mean, "growth_interval": [found.low, found.high]}


def verdict(found: Number, *, thinks: bool, state: str, moved: bool) -> dict[str, str]:
    """Code, headline and sentence. `found` is the last measurement with `growth`; `moved`: a window was closed."""
    if found.get("thought_gain") is None:
        return _said("unfinished", _unfinished(state), "Nothing has been measured yet.")
    judged = _judged(found, thinks, moved)
    if state != "done":
        return judged | {
            "code": "unfinished",
            "headline": f"{_unfinished(state)} So far: {_lower(judged['headline'])}",
        }
    return judged


def _judged(found: Number, thinks: bool, moved: bool) -> dict[str, str]:
    if not thinks:
        return _said(
            "no_thoughts",
            "This method teaches no thoughts.",
            "It is a control: what it gains, it gains without thinking. The thoughts shown were sampled to measure.",
        )
    if not moved:
        return _said(
            "not_learned",
            "No useful thoughts were learned: the model was never updated.",
            "These are the thoughts of the model as it came.",
        )
    above = {name: _above(found, name) for name in ("thought_gain", "gain_vs_base", "content_gain")}
    if "growth" in found:
        above["growth"] = _above(found, "growth")
    missing = [name for name in above if None in _ends(found, name)]
    if missing:
        return _said(
            "unclear",
            "Whether useful thoughts were learned cannot be told.",
            f"{_names(missing)} has no interval: too few development texts, or a run of an older version.",
        )
    if not all(above.values()):
        return _said("not_learned", "No useful thoughts were learned.", _why(above))
    held = _held(found)
    if held is False:
        return _said(
            "harmed",
            "Useful thoughts were learned, but the model without them got worse.",
            f"Its loss without a thought rose by more than {HOLD} nats per token, beyond the interval.",
        )
    doubt = "" if held else f" Whether it lost more than {HOLD} nats without thoughts cannot be told."
    return _said(
        "learned",
        "Useful thoughts were learned.",
        "The gain of a thought, its gain over the model before training and over another text's thought, and its "
        f"growth since the start are all above zero beyond their 95 % intervals.{doubt}",
    )


WORDS = {
    "thought_gain": "the gain of a thought over none",
    "gain_vs_base": "the gain over the model before training",
    "content_gain": "the gain over another text's thought",
    "growth": "the growth of the gain over the model before training",
}


def _why(above: dict[str, bool | None]) -> str:
    """Which numbers speak against it: those below zero first, then those whose interval holds zero."""
    parts = []
    for state, words in ((False, "below zero"), (None, "not told apart from zero")):
        names = [name for name, one in above.items() if one is state]
        if names:
            parts.append(f"{_names(names)} {'is' if len(names) == 1 else 'are'} {words}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]} (95 % interval)."


def _names(names: Sequence[str]) -> str:
    words = [WORDS[name] for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _unfinished(state: str) -> str:
    words = {
        "running": "The run is still going.",
        "stopped": "The run was stopped before its end.",
        "failed": "The run failed.",
        "missing": "The run has not begun.",
    }
    return words.get(state, "The run is not finished, and its process is gone.")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _said(code: str, headline: str, sentence: str) -> dict[str, str]:
    return {"code": code, "headline": headline, "sentence": sentence[:1].upper() + sentence[1:]}
