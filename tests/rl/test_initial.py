"""Initial weights: a function of seed and name, alike in no two places."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stage import assembled
from tfive.rl.initial import InitialWeights, dense

pytestmark = pytest.mark.model


def beginnings(named: dict[str, nn.Module]) -> dict[str, Tensor]:
    """The direction of the first numbers of every weight that begins at random, so that equal draws at another scale
    are seen as well."""
    weights = {
        f"{part}.{name}": weight.detach().flatten()[:4].double()
        for part, module in named.items()
        for name, weight in module.named_parameters()
        if weight.numel() >= 4 and bool(weight.detach().flatten()[:4].all())
    }
    return {name: first / first.norm() for name, first in weights.items()}


def test_no_two_weights_of_two_runs_begin_alike(tmp_path: Path) -> None:
    found: dict[str, Tensor] = {}
    for seed in (3, 4):
        run = assembled(tmp_path, f"run.seed={seed}", "critic.adapt=head")
        assert run.critics is not None
        assert run.gate is not None
        first, second = run.critics.critics
        calibrator = run.method.parts.calibrator
        heads = {"first critic": first.head, "second critic": second.head, "gate": run.gate.gate}
        heads |= {"weight head": calibrator.weight_head, "mean head": calibrator.mean_head}
        found |= beginnings({f"seed {seed}, {name}": head for name, head in heads.items()})
    assert len(found) == 2 * len({name.partition(", ")[2] for name in found}) > 20
    alike = [(a, b) for a, b in combinations(found, 2) if torch.allclose(found[a], found[b], atol=1e-3)]
    assert alike == []


def test_weights_depend_on_seed_and_name_alone() -> None:
    start = InitialWeights(1, "head")
    layer = dense(300, 200, start.of("first"), gain=2.0)
    assert torch.equal(layer.weight, dense(300, 200, InitialWeights(1, "head/first"), gain=2.0).weight)
    assert not layer.bias.any()
    assert float(layer.weight.detach().std()) == pytest.approx(2 / 300**0.5, rel=0.02)
    assert float(layer.weight.detach().mean()) == pytest.approx(0, abs=0.002)
    assert not torch.equal(start.normal(4, deviation=1.0), InitialWeights(2, "head").normal(4, deviation=1.0))
