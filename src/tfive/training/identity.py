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
from tfive.rl.roles import auxiliary_rollouts
from tfive.telemetry import DIAGNOSE
from tfive.training.build import Assembly
from tfive.training.recorder import Recorder

NOT_TRAINING = ("admit", "develop")
"""Phases that are no part of a step: the admission probe and measuring on development texts."""

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
    """What a comparison requires to be equal: base weights, corpus, positions, development items, precision, and how
    they are measured."""
    config, corpus, texts = assembly.config, assembly.corpus, assembly.development.texts
    return {
        "base_weights": weights_fingerprint(assembly.base.model),
        "corpus": corpus.fingerprint,
        "positions": digest(np.asarray(corpus.positions)),
        "development_items": digest(texts.items_BP.cpu().numpy(), texts.positions_BP.cpu().numpy()),
        "precision": str(assembly.base.model.dtype).removeprefix("torch."),
        **{f"evaluation.{key}": value for key, value in evaluation(config).items()},
    }


def evaluation(config: Config) -> dict[str, Any]:
    """How the development texts are measured; a group trains on several thoughts, but one is measured."""
    leaves = config.leaves()
    kept = {key: value for key, value in leaves.items() if key.startswith(("thought.", "sampling."))}
    kept.pop("thought.group")
    return {
        **kept,
        **{key: leaves[key] for key in ("run.develop_items", "run.develop_after")},
        "checkpoint": "last",
    }


def actor_items(assembly: Assembly, window: int) -> str | None:
    """Which actor texts a window drew, as a digest; None where it drew none."""
    account = assembly.ledger.state_dict()
    chosen = np.flatnonzero((account["last"] == window) & (np.asarray(assembly.corpus.role_of) == "actor"))
    return digest(chosen) if len(chosen) else None


def cost(assembly: Assembly, recorder: Recorder) -> dict[str, Any]:
    """What the run has spent so far: training seconds per phase (without what is only measured and reported), thought
    tokens, corpus tokens, thoughts.

    `corpus_tokens` are those of every text drawn, whatever its role; equal steps mean equal actor texts already.
    """
    account = recorder.account()
    drawn = sum(row["texts"] for row in assembly.ledger.rows())
    seconds = {phase: sum(roles.values()) for phase, roles in account["seconds"].items()}
    return {
        "seconds": without_diagnoses({p: spent for p, spent in seconds.items() if p not in NOT_TRAINING}),
        "thought_tokens": account["total"]["generated_tokens"],
        "corpus_tokens": drawn * assembly.corpus.sequence_length,
        "trajectories": account["total"]["trajectories"],
    }


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
    """n_aux beside the (G − 1)·N below which fewer thoughts are generated than by groups of G
    (eq:grpo-rollout-threshold)."""
    counts = {role: amounts["trajectories"] for role, amounts in account["roles"].items()}
    return {
        "items": windows * items,
        "actor": counts.get("actor", 0),
        "auxiliary": auxiliary_rollouts(counts),
        "group": GROUP,
        "threshold": (GROUP - 1) * windows * items,
    }
