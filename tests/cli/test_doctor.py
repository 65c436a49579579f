"""The doctor: whether a configuration fits a device, and the report for people and programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tfive.cli import doctor
from tfive.config.config import presets

GPU = doctor.Device("cuda:0 Big", "cuda", 140 * 2**30, ["bfloat16"])
CPU = doctor.Device("CPU", "cpu", 16 * 2**30, ["float32"])


def test_fit_is_judged_against_the_device() -> None:
    assert doctor.fit(["qwen3-1.7b"], [], GPU)["fits"] is True
    assert doctor.fit(["qwen3-1.7b"], [], CPU)["fits"] is False
    assert doctor.fit(["qwen3.5-9b"], [], GPU)["fits"] is False
    assert doctor.fit(["qwen3-1.7b"], [], replace(GPU, memory=None))["fits"] is None


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_a_memory_table(name: str) -> None:
    facts = doctor.fit([name], [], GPU)
    text = "\n".join(doctor.render_fit(facts))
    assert "activations" in text
    assert f"{facts['model']['parameters']:,} parameters" in text


def test_report_for_people_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_devices", lambda: [GPU, CPU])
    facts = json.loads(doctor.report(["qwen3-1.7b"], ["gae.alpha=0.05"], as_json=True))
    assert facts["python"]["ok"]
    assert facts["packages"]["torch"] is not None
    assert facts["disk"]["free"] > 0
    assert facts["configuration"]["broken_rules"][0].startswith("gae.alpha = 0.05")
    text = doctor.report([], [], as_json=False)
    assert "cuda:0 Big, 140.00 GiB" in text
    assert "configuration" not in json.loads(doctor.report([], [], as_json=True))


def test_this_machine_has_a_cpu() -> None:
    assert doctor.find_devices()[-1].kind == "cpu"
