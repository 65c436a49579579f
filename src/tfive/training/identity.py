"""What two runs must share before their numbers may stand in one table, and what each window cost.

Everything here is plain data that the summary keeps: `tfive compare` refuses runs whose identities differ, and cuts the
same logs at equal steps, seconds, corpus tokens or thought tokens.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tfive.config.config import Config
from tfive.models.weights import weights_fingerprint
from tfive.rl.roles import MEASURED, auxiliary_rollouts
from tfive.telemetry import DIAGNOSE
from tfive.training.build import Assembly
from tfive.training.recorder import Recorder

NOT_TRAINING = ("admit", "develop", "test", "benchmarks", "save")
"""Phases that are no part of a step: the admission probe and measuring on development texts, test texts, benchmarks."""

BEFORE_WINDOWS = ("warmstart", "positions")
"""Roles of thoughts that are drawn once, before the first window, whatever the method; the phases that draw them."""

GROUP = 8
"""Thoughts per item of the group baselines, which n_aux is held against (eq:grpo-rollout-threshold)."""


def digest(*arrays: npt.NDArray[Any]) -> str:
    """A short hash of some arrays: equal where shapes and contents are."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(str(array.shape).encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()[:20]


def identity(assembly: Assembly) -> dict[str, Any]:
    """What a comparison requires to be equal: base weights, corpus, positions, measured items, precision, and how
    they are measured."""
    config, corpus, warmed = assembly.config, assembly.corpus, assembly.warmstart
    places = config.text.positions
    measured = {"development_items": assembly.development.texts, "test_items": assembly.test.texts}
    return {
        # A warm start's weights differ by rounding from run to run; what it began with does not.
        "base_weights": weights_fingerprint(assembly.base.model) if warmed is None else warmed["base"],
        "corpus": corpus.fingerprint,
        # Positions that a pilot moves differ by rounding from run to run; how they are moved does not.
        "positions": places.model_dump() if places.variance else digest(np.asarray(corpus.positions)),
        **{n: digest(one.items_BP.cpu().numpy(), one.positions_BP.cpu().numpy()) for n, one in measured.items()},
        "precision": str(assembly.base.model.dtype).removeprefix("torch."),
        **({} if warmed is None else {"warmstart": config.warmstart.model_dump(mode="json")}),
        **{f"evaluation.{key}": value for key, value in evaluation(config).items()},
    }


def evaluation(config: Config) -> dict[str, Any]:
    """How texts are measured; a group trains on several thoughts, but one is measured."""
    leaves = config.leaves()
    kept = {key: value for key, value in leaves.items() if key.startswith(("thought.", "sampling."))}
    kept.pop("thought.group")
    return {
        **kept,
        "run.develop_items": leaves["run.develop_items"],
        "checkpoint": "last",
    }


def actor_items(assembly: Assembly, window: int) -> str | None:
    """Which actor texts a window drew, as a digest; None where it drew none, or where methods need not agree because
    this one has used up the texts that all have in common (`Ledger.shared_draw`)."""
    chosen = assembly.ledger.shared_draw(window)
    return None if chosen is None else digest(chosen)


def cost(assembly: Assembly, recorder: Recorder) -> dict[str, Any]:
    """What training has spent so far: seconds per phase, thought tokens, corpus tokens, thoughts; none of what only
    measures (development texts, diagnoses), which every method does alike.

    `corpus_tokens` are those of every text drawn, whatever its role; equal steps mean equal actor texts already.
    """
    account = recorder.account()
    drawn = sum(row["texts"] for row in assembly.ledger.rows())

    def trained(amount: str) -> int:
        measured = sum(account["roles"].get(role, {}).get(amount, 0) for role in MEASURED.values())
        return int(account["total"][amount]) - measured

    return {
        "seconds": spent_seconds(recorder),
        "thought_tokens": trained("generated_tokens"),
        "corpus_tokens": drawn * assembly.corpus.sequence_length,
        "trajectories": trained("trajectories"),
    }


def spent_seconds(recorder: Recorder) -> dict[str, float]:
    """Seconds of training so far, by phase."""
    seconds = {phase: sum(roles.values()) for phase, roles in recorder.account()["seconds"].items()}
    return without_diagnoses({phase: spent for phase, spent in seconds.items() if phase not in NOT_TRAINING})


def training_seconds(recorder: Recorder) -> float:
    """The whole of them: those of inner phases are in the phases around them."""
    return sum(spent for phase, spent in spent_seconds(recorder).items() if "/" not in phase)


def window_seconds(recorder: Recorder) -> float:
    """Those of windows alone, which `run.seconds` limits: what comes before the first ends by its own steps."""
    spent = spent_seconds(recorder)
    return sum(taken for phase, taken in spent.items() if "/" not in phase and phase not in BEFORE_WINDOWS)


def without_diagnoses(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, those of inner phases that only report taken from every phase around them."""
    kept = {path: spent for path, spent in seconds.items() if path.rpartition("/")[2] != DIAGNOSE}
    for path in seconds.keys() - kept.keys():
        around = path
        while around := around.rpartition("/")[0]:
            if around in kept:
                kept[around] -= seconds[path]
    return kept


def rollouts(account: dict[str, Any], windows: int, items: int) -> dict[str, Any]:
    """Thoughts that do not train the actor, beside the (G − 1)·N below which fewer are generated than by groups of G
    (eq:grpo-rollout-threshold).

    n_aux of eq:total-rollout-budget is `auxiliary` + `measured`. Measuring on development and test texts takes the same
    thoughts whatever the method, so it stands on both sides of the threshold and is told apart.
    """
    roles = {role: amounts for role, amounts in account["roles"].items() if role not in BEFORE_WINDOWS}
    counts = {role: amounts["trajectories"] for role, amounts in roles.items()}
    measured = sum(counts.get(role, 0) for role in MEASURED.values())
    return {
        "items": windows * items,
        "actor": counts.get("actor", 0),
        "auxiliary": auxiliary_rollouts(counts) - measured,
        "measured": measured,
        "group": GROUP,
        "threshold": (GROUP - 1) * windows * items,
    }
