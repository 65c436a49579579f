"""What the processes of `test_whole_run.py` do: train a run from its start to its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tfive
from tfive.cli.evaluate_suite import Wanted, evaluate
from tiny import configure


def trained(home: str, out: str, overrides: list[str]) -> dict[str, Any]:
    """What the summary says that every process must say alike, and what each took."""
    summary = tfive.train(configure(Path(home), *overrides), Path(out), quiet=True)
    account = {name: summary["account"][name] for name in ("roles", "total")}
    gains = {name: summary[name] for name in ("test_content_gain_end", "dev_thought_gain_end", "test_mixed_gain_end")}
    return {"account": account, "gains": gains, "processes": summary.get("processes"), "place": summary["place"]}


def evaluated(home: str, out: str) -> dict[str, Any]:
    """The scores of the untrained model on both tasks."""
    names = ("colours", "sums")
    wanted = Wanted(f"{home}/model", names, Path(home), Path(out), samples=2, temperature=1.0, device="cpu")
    scores = evaluate(wanted, quiet=True)
    return {name: scores["tasks"][name]["scores"] for name in names}
