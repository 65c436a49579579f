"""Two windows of every method with fixed seeds: numbers that move only when a change means them to.

Everything is float64 and starts from numpy's random numbers, so that traces agree between processors. To record them
anew after a change that was meant: `python tests/methods/test_golden.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from scene import play, until, weights

pytestmark = pytest.mark.model

KEYS = (
    "reward_scale", "critic_loss", "r2", "pilot_deviation", "information_gain", "policy_loss", "anchor_loss",
    "conditioned_loss", "clip_fraction", "policy_kl_last", "gradient_norm", "actor_gain", "mean_thought_length",
)  # fmt: skip
METHODS = ("ntp", "anchor-only", "quiet-star-ppo", "quiet-star-grpo", "rlp", "t5")
LEARNED: dict[str, Any] = {"mode": "learned", "kappa": 0.5, "weight_lr": 3e-2, "dropout": 0.0}


def trace(name: str, **settings: Any) -> dict[str, list[float]]:
    """Every reported number of both windows, and two sums over the actor's weights after each."""
    method, found = play(name, **settings), {}
    for window in (1, 2):
        until(method, "open")
        for key in KEYS:
            value = method.report.get(key)
            if value is not None:
                found[f"{key}/{window}"] = value if isinstance(value, list) else [value]
        vector = weights(method)
        found[f"weights/{window}"] = [float(vector.sum()), float(vector.square().sum())]
    return found


GOLDEN: dict[str, dict[str, list[float]]] = {
    "ntp": {
        "policy_loss/1": [0],
        "anchor_loss/1": [4.46518158],
        "conditioned_loss/1": [0],
        "clip_fraction/1": [0],
        "policy_kl_last/1": [0],
        "gradient_norm/1": [1.57631703],
        "weights/1": [86.587839, 843.782468],
        "policy_loss/2": [0],
        "anchor_loss/2": [4.0501263],
        "conditioned_loss/2": [0],
        "clip_fraction/2": [0],
        "policy_kl_last/2": [0],
        "gradient_norm/2": [1.37717622],
        "weights/2": [86.1331426, 843.750621],
    },
    "anchor-only": {
        "policy_loss/1": [0],
        "anchor_loss/1": [4.46460914],
        "conditioned_loss/1": [4.79211992],
        "clip_fraction/1": [0],
        "policy_kl_last/1": [0],
        "gradient_norm/1": [2.78832181],
        "actor_gain/1": [-0.127097556],
        "mean_thought_length/1": [4],
        "weights/1": [86.5542523, 844.125635],
        "policy_loss/2": [0],
        "anchor_loss/2": [4.05960086],
        "conditioned_loss/2": [4.30356566],
        "clip_fraction/2": [0],
        "policy_kl_last/2": [0],
        "gradient_norm/2": [1.93553479],
        "actor_gain/2": [-0.148168978],
        "mean_thought_length/2": [4],
        "weights/2": [85.9993574, 844.069624],
    },
    "quiet-star-ppo": {
        "reward_scale/1": [0.50000001],
        "critic_loss/1": [0.18077198],
        "r2/1": [-0.0315413784],
        "policy_loss/1": [0.0935783357],
        "anchor_loss/1": [4.18976313],
        "conditioned_loss/1": [4.38391132],
        "clip_fraction/1": [0.0454545455],
        "policy_kl_last/1": [0.0129124487],
        "gradient_norm/1": [3.27789137],
        "actor_gain/1": [-0.348462384],
        "mean_thought_length/1": [3.88888884],
        "weights/1": [86.9687664, 843.983502],
        "reward_scale/2": [0.506954866],
        "critic_loss/2": [0.38295653],
        "r2/2": [-0.72399291],
        "policy_loss/2": [8.95909043e-05],
        "anchor_loss/2": [4.12659355],
        "conditioned_loss/2": [3.9898011],
        "clip_fraction/2": [0.0625],
        "policy_kl_last/2": [0.0122869095],
        "gradient_norm/2": [3.47211528],
        "actor_gain/2": [0.231193098],
        "mean_thought_length/2": [4],
        "weights/2": [86.6711961, 844.007593],
    },
    "quiet-star-grpo": {
        "reward_scale/1": [0.50000001],
        "policy_loss/1": [0.00943236015],
        "anchor_loss/1": [4.46086668],
        "conditioned_loss/1": [4.79324597],
        "clip_fraction/1": [0.0652173913],
        "policy_kl_last/1": [0.039697375],
        "gradient_norm/1": [2.98827742],
        "actor_gain/1": [-0.139244985],
        "mean_thought_length/1": [3.86111116],
        "weights/1": [86.8643503, 843.943617],
        "reward_scale/2": [0.487840685],
        "policy_loss/2": [0.0101992073],
        "anchor_loss/2": [4.06490148],
        "conditioned_loss/2": [4.2655669],
        "clip_fraction/2": [0.0483870968],
        "policy_kl_last/2": [0.0114113413],
        "gradient_norm/2": [2.4291433],
        "actor_gain/2": [-0.156570895],
        "mean_thought_length/2": [3.94444442],
        "weights/2": [86.4259988, 843.865557],
    },
    "rlp": {
        "information_gain/1": [-0.393726035],
        "policy_loss/1": [0.00103156589],
        "anchor_loss/1": [4.46512965],
        "conditioned_loss/1": [4.79116504],
        "clip_fraction/1": [0.0760869565],
        "policy_kl_last/1": [0.044926531],
        "gradient_norm/1": [2.84472514],
        "actor_gain/1": [-0.393726035],
        "mean_thought_length/1": [3.86111116],
        "weights/1": [86.7263328, 844.122596],
        "information_gain/2": [-0.140488347],
        "policy_loss/2": [0.00251107259],
        "anchor_loss/2": [4.05801291],
        "conditioned_loss/2": [4.28776771],
        "clip_fraction/2": [0.0241935484],
        "policy_kl_last/2": [0.0107179953],
        "gradient_norm/2": [2.05269286],
        "actor_gain/2": [-0.329305756],
        "mean_thought_length/2": [3.88888884],
        "weights/2": [86.1726084, 844.158247],
    },
    "t5": {
        "reward_scale/1": [0.50000001],
        "critic_loss/1": [0.507236294, 0.441750721],
        "r2/1": [0.00396539082, -0.110449525],
        "pilot_deviation/1": [0.757712022],
        "policy_loss/1": [-0.0172035092],
        "anchor_loss/1": [4.19990083],
        "conditioned_loss/1": [4.17112974],
        "clip_fraction/1": [0.0416666667],
        "policy_kl_last/1": [0.0371661881],
        "gradient_norm/1": [3.30536848],
        "actor_gain/1": [0.222225972],
        "mean_thought_length/1": [4],
        "weights/1": [86.8127603, 843.922076],
        "reward_scale/2": [0.489960349],
        "critic_loss/2": [0.326790611, 0.323983654],
        "r2/2": [-0.272604309, -0.115223368],
        "pilot_deviation/2": [0.908325609],
        "policy_loss/2": [-0.417389964],
        "anchor_loss/2": [4.38478685],
        "conditioned_loss/2": [4.11082514],
        "clip_fraction/2": [0],
        "policy_kl_last/2": [0.00719135672],
        "gradient_norm/2": [3.88482573],
        "actor_gain/2": [0.599099851],
        "mean_thought_length/2": [3.77777767],
        "weights/2": [86.352901, 843.887199],
    },
}

LEARNED_GOLDEN: dict[str, float] = {
    "moment": 0.000486922,
    "retention": 0.00040021,
    "weight_mean": 0.472555,
    "weight_deviation": 0.0314798,
    "signal": 0.919723,
    "policy_loss": 0.58434,
}


@pytest.mark.parametrize("name", METHODS)
def test_trace(name: str) -> None:
    found, golden = trace(name), GOLDEN[name]
    assert found.keys() == golden.keys()
    for key, numbers in golden.items():
        assert found[key] == pytest.approx(numbers, rel=1e-6, abs=1e-9), key


def test_trace_of_the_learned_weight() -> None:
    """Its heads compute in float32, so less of it is the same everywhere."""
    method = play("t5", **LEARNED)
    until(method, "open")
    assert method.report["mixture"] == "learned"
    for key, number in LEARNED_GOLDEN.items():
        assert method.report[key] == pytest.approx(number, rel=1e-3), key


if __name__ == "__main__":
    for one in METHODS:
        print(f'    "{one}": {{')
        for key, numbers in trace(one).items():
            print(f'        "{key}": [{", ".join(f"{number:.9g}" for number in numbers)}],')
        print("    },")
    calibrated = play("t5", **LEARNED)
    until(calibrated, "open")
    for key in ("moment", "retention", "weight_mean", "weight_deviation", "signal", "policy_loss"):
        print(f'    "{key}": {calibrated.report[key]:.6g},')
