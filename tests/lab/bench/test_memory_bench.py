"""The memory benchmark: what it counts is what there is, and the estimate is what it says of the same window."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from scripts import script
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.shape import find_shape
from tfive.training.memory import estimate
from tfive_lab.bench import memory
from tfive_lab.bench.memory import TensorMeter, facts_of, memory_report, predicted
from tfive_lab.bench.step import StepWork

SMALLEST = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4096, "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}  # fmt: skip
WORK = StepWork(items=4, steps=2, length=3, positions=2, tokens=48, horizon=2)


def test_tensors_count_from_their_making_to_their_end() -> None:
    with TensorMeter() as meter:
        kept = torch.ones(1000)
        meter.reset()
        for _ in range(3):
            wide = torch.ones(5000)
            view = wide[:10]
            del wide
            assert meter.live() == 4 * 6000  # a view keeps what it looks at
            del view
        assert meter.live() == 4 * 1000
        assert meter.peak() == 4 * 6000
        leaf = kept.clone().requires_grad_()
        (leaf.exp() * leaf).sum().backward()
        assert meter.live() == 4 * 3000  # the clone and its gradient; what the graph kept is gone
    assert meter.peak() > 4 * 3000


def test_phases_are_predicted_by_the_passes_they_make() -> None:
    config = Config.load("qwen3-1.7b", overrides=["critic.adapt=lora"])
    shape = find_shape(config.model.name)
    assert shape is not None
    table = estimate(config, shape, on_gpu=True)
    by_role = {row.role: row.transient for row in table.rows}
    assert predicted(table, "update") == table.lasting + by_role["actor"]
    assert predicted(table, "collect") == table.lasting + by_role["rollout and scoring"]
    assert max(predicted(table, phase) for phase in ("update", "collect", "fit")) == table.total


@pytest.mark.model
def test_a_measured_window_is_near_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(memory.LOCAL, "smallest", SMALLEST)
    kept: list[dict[str, Any]] = []
    report = memory_report(
        "smallest", ["anchor-only"], [WORK], device="cpu", windows=2, keep=lambda one: kept.append(dict(one))
    )
    assert len(kept) == 1
    (run,) = report["runs"]
    assert run["measured_bytes"] == max(phase["measured"] for phase in run["phases"].values())
    assert run["measured_bytes"] == run["phases"]["update"]["measured"]
    assert run["predicted_over_measured"] == pytest.approx(1.0, abs=0.15)
    assert run["lasting"]["predicted"] == pytest.approx(run["lasting"]["measured"], rel=0.1)
    assert len(run["window_s"]) == 2
    assert run["steady"]
    json.dumps(report)


def test_unknown_shapes_are_named() -> None:
    with pytest.raises(UserError, match="qwen3-4b"):
        facts_of("giant")


def test_the_script_knows_its_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    module = script("benchmarks/memory.py")
    with pytest.raises(SystemExit):
        module.main(["--shape", "giant"])
    assert "qwen3.5-9b" in capsys.readouterr().err
