"""The methods that ship with the package, each as its declaration. Importing this imports no model library."""

from __future__ import annotations

import math
from typing import Any

from tfive.methods.settings import GrpoSettings, PpoSettings, RlpSettings
from tfive.methods.spec import MethodSpec

CROSSED_TEXTS = 4
"""Texts that the actor's set must hold where its halves are crossed: each half teaches with one and validates with
another."""


def _t5_small_roles(config: Any) -> tuple[str, ...]:
    """What judges critics and mixes their advantages; heads have roles of their own only where a weight is learned."""
    learns = config.calibration.mode in ("learned", "state", "repeated")
    heads = ("head_train", "head_validate") if learns else ()
    return ("qualify", "pilot", *heads)


def _t5_roles(config: Any) -> tuple[str, ...]:
    probe = ("probe",) if config.window.probe else ()
    again = ("qualify",) if config.qualify.consecutive > 1 else ()
    small = again if config.window.crossed else _t5_small_roles(config)
    return (*_drawn_anew(config, "critic_fit"), *small, "actor", *_drawn_anew(config, "scale"), *probe)


def _t5_first_roles(config: Any) -> tuple[str, ...]:
    once = ("critic_fit", "scale", *(_t5_small_roles(config) if config.window.crossed else ()))
    return tuple(role for role in once if role not in _t5_roles(config)) if config.window.history else ()


def _ppo_roles(config: Any) -> tuple[str, ...]:
    return (*_drawn_anew(config, "critic_fit"), "actor")


def _ppo_first_roles(config: Any) -> tuple[str, ...]:
    return ("critic_fit", "scale") if config.window.history else ("scale",)


def _drawn_anew(config: Any, role: str) -> tuple[str, ...]:
    """A role that every window draws, unless the actor's thoughts of the window before serve."""
    return () if config.window.history else (role,)


def _t5_crosses_halves(config: Any) -> str | None:
    if not config.window.crossed:
        return None
    said = "window.crossed = true"
    if not config.window.history:
        fitted = "only critics that history fits are new to the actor's thoughts"
        return f"{said}: {fitted}; use window.history = true, or window.crossed = false"
    if config.reward.reference == "foreign":
        borrows = "reward.reference = foreign holds thoughts of one half against those of the other"
        return f"{said}: {borrows}; use reward.reference = no_thought"
    if config.calibration.mode == "repeated":
        return f"{said}: calibration.mode = repeated draws its own continuations; use calibration.mode = learned"
    if (texts := math.ceil(config.window.items / config.text.positions.per_text)) < CROSSED_TEXTS:
        least = (CROSSED_TEXTS - 1) * config.text.positions.per_text + 1
        return (
            f"{said}: the actor's {config.window.items} items may stand in {texts} texts, too few for halves that "
            f"teach and validate; use window.items ≥ {least}"
        )
    return None


def _ppo_moves_within_the_run(config: Any) -> str | None:
    frozen, windows = config.ppo.frozen_windows, config.window.windows - config.reading_windows
    if frozen == 0 or frozen < windows:
        return None
    said = f"ppo.frozen_windows = {frozen}: the actor would never move in {windows} windows"
    return f"{said}; use ppo.frozen_windows ≤ {max(0, windows - 1)}"


BASE = MethodSpec(
    name="base",
    summary="the model as it came, measured and never updated (control)",
    method="tfive.methods.controls:Base",
    page="explanation/methods/controls.md",
    trains=False,
    thinks=False,
    rewarded=False,
    roles=(),
    recorded=(),
)

NTP = MethodSpec(
    name="ntp",
    summary="next-token likelihood on the same texts, no thoughts",
    method="tfive.methods.controls:NextToken",
    page="explanation/methods/controls.md",
    thinks=False,
    rewarded=False,
    recorded=(),
)

ANCHOR_ONLY = MethodSpec(
    name="anchor-only",
    summary="thoughts and anchors without a policy gradient (control)",
    method="tfive.methods.controls:AnchorOnly",
    page="explanation/methods/controls.md",
    rewarded=False,
    recorded=(),
)

QUIET_STAR_PPO = MethodSpec(
    name="quiet-star-ppo",
    summary="Quiet-STaR's thoughts, one critic, clipped PPO, warm-up of fixed length",
    method="tfive.methods.quiet_star:QuietStarPPO",
    page="explanation/methods/quiet-star.md",
    settings=PpoSettings,
    section="ppo",
    uses=("critic", "gae"),
    critics=1,
    roles=_ppo_roles,
    first_roles=_ppo_first_roles,
    rules=(_ppo_moves_within_the_run,),
)

QUIET_STAR_GRPO = MethodSpec(
    name="quiet-star-grpo",
    summary="Quiet-STaR's thoughts, group-relative advantages",
    method="tfive.methods.quiet_star:QuietStarGRPO",
    page="explanation/methods/quiet-star.md",
    settings=GrpoSettings,
    section="grpo",
    group=8,
    first_roles=("scale",),
)

RLP = MethodSpec(
    name="rlp",
    summary="information gain of the next token against a moving average that does not think",
    method="tfive.methods.rlp:RLP",
    page="explanation/methods/rlp.md",
    settings=RlpSettings,
    section="rlp",
    group=8,
    scoring="next_token",
    averages=("EMA teacher",),
)

T5 = MethodSpec(
    name="t5",
    summary="two qualified critics, a calibrated mix of their advantages, clipped PPO",
    method="tfive.methods.t5:T5",
    page="explanation/methods/t5.md",
    uses=("critic", "gae", "qualify", "calibration"),
    critics=2,
    roles=_t5_roles,
    first_roles=_t5_first_roles,
    recorded=("head_train", "head_validate", "actor"),
    rules=(_t5_crosses_halves,),
)

SPECS = (BASE, NTP, ANCHOR_ONLY, QUIET_STAR_PPO, QUIET_STAR_GRPO, RLP, T5)
