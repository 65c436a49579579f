"""Data of pages for the browser tests, in the form that `tfive report` writes: drawn from a seed, small."""

from __future__ import annotations

import random
from typing import Any

from thought_samples import Data, explorer

AXES = ("windows", "seconds", "corpus_tokens", "thought_tokens")


def story(code: str = "learned") -> Data:
    """A verdict and the three numbers with their controls."""
    numbers = [
        ("prediction", "gain_vs_base", "Text after a thought is predicted better", 0.141, 0.118, 0.164, -0.075, True),
        ("content", "content_gain", "What the thought says matters", 0.23, 0.205, 0.255, 0.002, True),
        ("harm", "no_thought_drift", "The model without thoughts was not harmed", 0.004, -0.002, 0.01, 0.0, None),
    ]
    return {
        "verdict": {
            "code": code,
            "headline": "The model learned useful thoughts.",
            "sentence": "What follows a thought is predicted better, and the thought's own content is why.",
        },
        "numbers": [
            {
                "id": name,
                "metric": metric,
                "title": title,
                "unit": "nats per token",
                "value": value,
                "low": low,
                "high": high,
                "start": start,
                "good": good,
                "sentence": "Above 0 is better; the interval excludes 0.",
                "control": {
                    "title": "another text's thought",
                    "metric": "other_gain",
                    "value": -0.01,
                    "low": -0.03,
                    "high": 0.012,
                },
            }
            for name, metric, title, value, low, high, start, good in numbers
        ],
        "limits": ["One seed: another may differ.", "Development texts, not test texts."],
    }


def curve(rng: random.Random, count: int, start: float, end: float, spread: float | None = 0.03) -> Data:
    """A noisy way from one value to another, with an interval."""
    values = [
        round(start + (end - start) * at / max(count - 1, 1) + rng.gauss(0, 0.006), 4) if at else start
        for at in range(count)
    ]
    if spread is None:
        return {"value": values, "low": None, "high": None}
    return {
        "value": values,
        "low": [round(value - spread, 4) for value in values],
        "high": [round(value + spread, 4) for value in values],
    }


def axis_values(count: int, first: int = 0, stride: int = 1) -> dict[str, list[float]]:
    """The four horizontal axes for `count` reports."""
    windows = [first + stride * at for at in range(count)]
    return {
        "windows": [float(window) for window in windows],
        "seconds": [round(6.7 * window, 1) for window in windows],
        "corpus_tokens": [float(4096 * window) for window in windows],
        "thought_tokens": [float(1536 * window) for window in windows],
    }


def meanings() -> Data:
    """A few names with their meanings."""
    named = {
        "thought_gain": "loss without a thought − loss with one's own",
        "content_gain": "loss with another item's thought − loss with one's own",
        "gain_vs_base": "the base model's loss without a thought − loss with one",
        "other_gain": "gain of another item's thought",
        "no_thought_drift": "loss without a thought minus the base model's",
        "r2": "held-out R² of each critic",
    }
    return {
        name: {
            "title": name.replace("_", " "),
            "what": what,
            "healthy": "above 0",
            "otherwise": "raise `anchor.next_token`",
            "unit": "nats per token",
        }
        for name, what in named.items()
    }


def run_page(**changed: Any) -> Data:
    """The page of one finished run with everything on it."""
    rng = random.Random(3)
    development, training = 6, 20
    phases = ["open", "fit", "qualify", "calibrate", "actor"]
    seconds = [[round(rng.uniform(0.4, 2.4), 2) for _ in phases] for _ in range(training)]
    critics = ["critic 1", "critic 2"]
    data: Data = {
        "format": 1,
        "version": "1",
        "kind": "run",
        "title": "t5 on nano, seed 0",
        "state": "done",
        "failure": None,
        "live": None,
        "header": [
            {"name": "method", "value": "t5", "hint": "Twin critics, calibrated advantages."},
            {"name": "model", "value": "nano, 0.4M parameters", "hint": ""},
            {"name": "texts", "value": "boxes, letters", "hint": ""},
            {"name": "trained for", "value": "20 windows, 134 s", "hint": ""},
        ],
        "story": story(),
        "meanings": meanings(),
        "axes": [{"id": name, "title": name.replace("_", " ")} for name in AXES],
        "charts": [
            {
                "id": "gain",
                "title": "Gains on development texts",
                "unit": "nats per token",
                "zero": True,
                "open": True,
                "x": "development",
                "series": ["thought_gain", "content_gain"],
            },
            {
                "id": "drift",
                "title": "Did the loss without a thought rise?",
                "unit": "nats per token",
                "zero": True,
                "open": True,
                "x": "development",
                "series": ["no_thought_drift"],
            },
            {
                "id": "critics",
                "title": "Critics",
                "unit": "R²",
                "zero": False,
                "open": True,
                "x": "training",
                "series": ["r2.1", "r2.2"],
            },
            {
                "id": "policy",
                "title": "Policy",
                "unit": "",
                "zero": False,
                "open": False,
                "x": "training",
                "series": ["policy_kl"],
            },
        ],
        "x": {"development": axis_values(development, 0, 4), "training": axis_values(training, 1)},
        "series": {
            "development": {
                "thought_gain": curve(rng, development, -0.075, 0.141),
                "content_gain": curve(rng, development, 0.002, 0.23),
                "no_thought_drift": curve(rng, development, 0.0, 0.004, 0.006),
            },
            "training": {
                "r2.1": curve(rng, training, 0.05, 0.31, None),
                "r2.2": curve(rng, training, 0.04, 0.32, None),
                "policy_kl": curve(rng, training, 0.001, 0.004, None),
            },
        },
        "events": {
            "window": [1, 4],
            "seconds": [6.7, 26.8],
            "event": ["qualification", "qualification"],
            "detail": ["passed", "admitted"],
        },
        "timeline": {
            "phases": phases,
            "windows": list(range(1, training + 1)),
            "seconds": seconds,
            "total": [round(sum(column), 2) for column in zip(*seconds)],
        },
        "critics": {
            "names": critics,
            "needed": 0.2,
            "windows": list(range(1, training + 1)),
            "r2": [curve(rng, training, 0.05, 0.31)["value"] for _ in critics],
            "r2_within": [curve(rng, training, 0.02, 0.3)["value"] for _ in critics],
            "per_step": {
                "steps": list(range(1, 9)),
                "r2": [[curve(rng, 8, 0.4, 0.2)["value"] for _ in range(2)] for _ in critics],
            },
            "calibration": [
                {
                    "window": 20,
                    "critic": critic,
                    "predicted": [-1.0, -0.4, 0.0, 0.5, 1.1],
                    "returned": [-0.8, -0.5, 0.1, 0.4, 1.0],
                    "low": [-1.0, -0.7, -0.1, 0.2, 0.8],
                    "high": [-0.6, -0.3, 0.3, 0.6, 1.2],
                    "count": [40] * 5,
                }
                for critic in range(2)
            ],
        },
        "weights": {
            "windows": list(range(1, training + 1)),
            "mean": curve(rng, training, 0.5, 0.55)["value"],
            "deviation": [0.08] * training,
            "histogram": [
                {"window": 20, "edges": [at / 10 for at in range(11)], "count": [0, 1, 5, 20, 60, 80, 40, 12, 3, 0]}
            ],
        },
        "account": {
            "roles": ["actor", "critic"],
            "kinds": ["trajectories", "generated_tokens"],
            "amounts": [[5120, 61440], [2048, 24576]],
            "phases": [*phases, "fit/adapt"],
            "seconds": [*(round(sum(column), 2) for column in zip(*seconds)), 3.0],
            "wall_seconds": 134.2,
        },
        "explorers": [explorer()],
        "compare": None,
        "evaluation": None,
        "absent": {},
        "files": [{"name": "metrics.jsonl", "what": "every window's numbers"}],
    }
    return {**data, **changed}


def bare_page(**changed: Any) -> Data:
    """A page on which every optional part is missing."""
    empty: Data = {
        "story": {
            "verdict": {
                "code": "unfinished",
                "headline": "Nothing can be said yet.",
                "sentence": "No window has been measured.",
            },
            "numbers": [],
            "limits": [],
        },
        "charts": [],
        "x": {"development": {}, "training": {}},
        "series": {"development": {}, "training": {}},
        "events": {"window": [], "seconds": [], "event": [], "detail": []},
        "timeline": None,
        "critics": None,
        "weights": None,
        "account": None,
        "explorers": [],
        "files": [],
        "header": [],
    }
    return run_page(**{**empty, **changed})


def study_page() -> Data:
    """Two methods with two seeds each, one of them failed."""
    rng = random.Random(5)

    def measured(mean: float) -> Data:
        return {"mean": mean, "low": round(mean - 0.02, 4), "high": round(mean + 0.02, 4), "seeds": 2, "texts": 64}

    runs = [
        {
            "label": label,
            "seed": seed,
            "state": "done",
            "failure": None,
            "disturbed": False,
            "x": axis_values(6, 0, cost),
            "series": {"content_gain": curve(rng, 6, 0.0, end), "mixed_gain": curve(rng, 6, 0.0, end / 2)},
        }
        for label, cost, end in (("t5", 4, 0.23), ("rlp", 6, 0.12))
        for seed in (0, 1)
    ]
    runs.append(
        {
            "label": "rlp",
            "seed": 2,
            "state": "failed",
            "failure": "returns without variance",
            "disturbed": False,
            "x": axis_values(1),
            "series": {},
        }
    )
    compare = {
        "reference": "t5",
        "rules": ["Equal texts, equal steps."],
        "limits": ["Two seeds say little."],
        "metrics": ["content_gain", "mixed_gain"],
        "methods": [
            {
                "label": label,
                "seeds": [0, 1],
                "failed": failed,
                "open": [],
                "start": 0.0,
                "measured": {"content_gain": measured(mean), "mixed_gain": measured(mean / 2)},
                "seconds_per_step": 0.4,
                "actor_per_item": 1,
                "auxiliary_per_item": 3.2,
                "thought_tokens": 30000,
                "corpus_tokens": 90000,
            }
            for label, mean, failed in (("t5", 0.23, []), ("rlp", 0.12, [2]))
        ],
        "differences": [
            {
                "label": "rlp",
                "seeds": [0, 1],
                "measured": {"content_gain": measured(0.11), "mixed_gain": measured(0.01)},
            }
        ],
        "runs": runs,
    }
    return bare_page(
        kind="study",
        title="t5 and rlp on nano",
        compare=compare,
        explorers=[explorer(30), {**explorer(30, 2), "label": "rlp"}],
    )


def evaluation_page() -> Data:
    """Two models on two benchmarks, item by item."""
    rng = random.Random(9)
    count = 40
    correct = [[rng.randint(0, 1) for _ in range(count)] for _ in range(2)]
    correct[0][:4], correct[1][:4] = [1, 0, 1, 0], [0, 1, 1, 0]

    def answers(model: int) -> Data:
        return {
            "item": list(range(count)),
            "sample": [0] * count,
            "correct": correct[model],
            "extracted": [str(item) for item in range(count)],
            "output": [f"Answer of model {model} to item {item}: it is {item}." for item in range(count)],
            "cut": [0] * count,
            "tokens": [12] * count,
            "thoughts": [model * 2] * count,
            "thought_tokens": [model * 20] * count,
            "ended": ["stop"] * count,
            "way": ["generated"] * count,
        }

    value = {"mean": 0.5, "low": 0.4, "high": 0.6}
    evaluation = {
        "models": [
            {"name": "base", "folder": "evals/a", "when": "never", "settings": "greedy"},
            {"name": "thinking", "folder": "evals/b", "when": "every", "settings": "greedy"},
        ],
        "tasks": [
            {
                "name": name,
                "kind": "math",
                "items": 20,
                "measures": [
                    {
                        "name": "pass@1",
                        "primary": True,
                        "share": True,
                        "values": [value, value],
                        "difference": {"mean": 0.05, "low": -0.01, "high": 0.11},
                    }
                ],
            }
            for name in ("sums", "boxes")
        ],
        "items": {
            "task": [item % 2 for item in range(count)],
            "id": [f"q{item}" for item in range(count)],
            "question": [f"Question {item}: how many boxes?" for item in range(count)],
            "choices": [[] for _ in range(count)],
            "gold": [str(item) for item in range(count)],
            "answers": [answers(0), answers(1)],
        },
        "left_out": 3,
    }
    return bare_page(kind="evaluation", title="base and thinking", evaluation=evaluation)
