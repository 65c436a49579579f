"""The few thoughts that a summary of an older version holds as text, in the form of the explorer."""

from __future__ import annotations

from typing import Any

from tfive.report.record import RunRecord
from tfive.report.thoughts import GAINS, QUANTITIES


def sampled(record: RunRecord) -> dict[str, Any] | None:
    """The explorer of a run that kept no tokens: each place with its thoughts and gains; None where it has none.

    Samples are the first items of a measurement; what stands before and after a thought is one piece each.
    """
    shown = [one for one in record.history if one.get("samples")]
    if not shown:
        return None
    places = [(one["before"], one["after"]) for one in shown[-1]["samples"]]
    shown = [one for one in shown if [(s["before"], s["after"]) for s in one["samples"]] == places]
    pieces = list(dict.fromkeys([*(text for pair in places for text in pair), *_thoughts(shown)]))
    number = {text: index for index, text in enumerate(pieces)}
    count = len(places)
    return {
        "label": record.run.label,
        "seed": record.seed,
        "horizon": record.setting("thought.horizon"),
        "length": record.setting("thought.length"),
        "checkpoints": record.setting("thought.checkpoints"),
        "thinks": bool(record.account.get("total", {}).get("generated_tokens")),
        "critics": 0,
        "gate": False,
        "windows": [one["window"] for one in shown],
        "names": ["start" if not one["window"] else "end" for one in shown],
        "sources": [],
        "kinds": [],
        "pieces": pieces,
        "texts": {
            "id": list(range(count)),
            "source": [-1] * count,
            "offsets": [2 * row for row in range(count + 1)],
            "tokens": [number[text] for pair in places for text in pair],
            "documents": [[0, 2]] * count,
        },
        "items": {
            "id": list(range(count)),
            "text": list(range(count)),
            "position": [0] * count,
            **dict.fromkeys(("kind", "source", "detail"), [-1] * count),
        },
        "quantities": dict(QUANTITIES),
        "snapshots": [_snapshot(record, one, number) for one in shown],
        "left_out": 0,
    }


def _thoughts(shown: list[dict[str, Any]]) -> list[str]:
    return [sample["thought"] for one in shown for sample in one["samples"]]


def _snapshot(record: RunRecord, measurement: dict[str, Any], number: dict[str, int]) -> dict[str, Any]:
    samples = measurement["samples"]
    items = record.items(measurement["window"])
    count = len(samples)

    def gains(name: str) -> list[int] | None:
        if len(items.get(name, ())) < count:
            return None
        return [round(float(value) / QUANTITIES["gain"]) for value in items[name][:count]]

    return {
        "length": [1] * count,
        "closed": [0] * count,
        "tokens": [number[sample["thought"]] for sample in samples],
        **{name: gains(name) for name in GAINS},
        "gate": None,
        "detail": None,
    }
