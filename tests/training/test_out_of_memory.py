"""A run that finds no memory, anywhere: one line that says where and what to lower, and it goes on afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from soak.life import compare, final_state, lines, same
from soak.starved import PLACES
from tfive.cli.doctor import Device, fit, render_fit
from tfive.config.config import Config
from tfive.errors import RunFailed, UserError, out_of_memory
from tfive.methods.method import Method
from tfive.rl.actor import Actor
from tfive.rl.trajectory import Trajectories
from tfive.training import memory_limits, start
from tfive.training.checkpoint import CheckpointStore
from tfive.training.continuity import MAY_CHANGE
from tfive.training.memory_limits import engine_options, out_of_memory_explained
from tfive.training.remedies import lower_and_resume, smaller_passes, smaller_weights
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.status_files import COSTS
from tfive.training.summary import SUMMARY
from tfive.tree.fast import delta_kernel
from tfive.tree.fast.agreement import kernel_trouble
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch
from tiny import configure

SETTINGS = ("method=ntp", "run.seed=2", "run.develop_items=4", "run.explorer_items=0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> Path:
    start.train(configure(home, *SETTINGS), home / "undisturbed", quiet=True)
    return home / "undisturbed"


@contextmanager
def starved(name: str) -> Iterator[pytest.ExceptionInfo[RunFailed]]:
    """Work that finds no memory at a place, and says so."""
    place = PLACES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.owner, place.function, getattr(place.owner, place.function))  # to be put back
        place.starve("cpu")
        with pytest.raises(RunFailed, match=re.escape(place.says)) as failed:
            yield failed
    assert "resume" in str(failed.value)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("name", ["update", "first measurement", "test", "save", "build"])
def test_a_run_without_memory_says_where_and_goes_on_to_the_bit(
    home: Path, undisturbed: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    with starved(name):
        start.train(configure(home, *SETTINGS), folder, quiet=True)
    with pytest.raises(UserError, match="go on with tfive resume"):
        start.train(configure(home, *SETTINGS), folder, quiet=True)
    start.resume(folder, quiet=True)
    compare(undisturbed, folder)


def test_a_checkpoint_that_memory_is_too_short_for_is_not_called_another_runs(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with starved("test"):
        start.train(configure(home, *SETTINGS), folder, quiet=True)
    with starved("restore"):
        start.resume(folder, quiet=True)
    # Windows that were trained are not begun again unasked when their checkpoints are gone.
    for path in CheckpointStore(folder / CHECKPOINTS).paths():
        path.rename(tmp_path / path.name)
    costs = (folder / COSTS).read_bytes()
    with pytest.raises(UserError, match="no usable checkpoint"):
        start.resume(folder, quiet=True)
    assert (folder / COSTS).read_bytes() == costs


def test_memory_is_recognised_behind_what_hides_it() -> None:
    for error in (torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("[enforce] can't allocate memory: 9 B")):
        assert out_of_memory(error)
    hidden = RuntimeError("operation failed due to a previous error during capture")
    hidden.__context__ = torch.OutOfMemoryError("CUDA")
    with pytest.raises(RunFailed, match="phase fit"), out_of_memory_explained("fit", Config.load("nano")):
        raise hidden
    with pytest.raises(RuntimeError, match="shape"), out_of_memory_explained("fit", Config.load("nano")):
        raise RuntimeError("wrong shape")


def test_what_the_device_said_is_cut_between_sentences_or_words() -> None:
    told = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB"
    rest = " is free. Including non-PyTorch memory, this process has 138.47 GiB memory in use."
    for message, kept in (
        (told + rest, told + " is free"),
        (f"can't allocate memory:{' you tried to allocate it' * 9}", "can't allocate memory: you tried"),
        ("out of memory " + "9" * 200, "out of memory …"),
        ("out of memory", "out of memory"),
    ):
        with pytest.raises(RunFailed) as failed, out_of_memory_explained("fit", Config.load("nano")):
            raise torch.OutOfMemoryError(message)
        said = str(failed.value).split(" (", 1)[1].split("); ")[0]
        assert said.startswith(kept)
        assert len(said) <= 162
        assert message.startswith(said.removesuffix(" …"))
        assert message[len(said.removesuffix(" …")) :][:1] in ("", " ", "."), "no word is cut"


def test_kernels_are_not_given_up_because_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*arguments: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA")

    with pytest.raises(torch.OutOfMemoryError):
        kernel_trouble(short, (16,), torch.device("cuda"), torch.float32)
    monkeypatch.setattr(delta_kernel, "rule_differences", short)
    with pytest.raises(torch.OutOfMemoryError):
        delta_kernel.distrust(cast(delta_kernel.Kernel, None), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("phase", ["fit", "update", "collect", "develop", "save", "build"])
def test_what_to_lower_may_be_lowered_and_is_not_at_its_end(phase: str) -> None:
    small = ("run.texts_per_pass=1", "engine.activation_checkpointing=true")
    assert "as small as they can be" in lower_and_resume(phase, Config.load("nano", overrides=small))
    fewer = lower_and_resume(phase, Config.load("nano", overrides=(*small, "run.texts_per_rollout=64")))
    # Nothing is read in an update or a save; a fit samples and scores its sets.
    assert ("run.texts_per_rollout (now 64)" in fewer) == (phase not in ("update", "save"))
    for overrides in ((), ("run.texts_per_pass=1",), ("run.texts_per_rollout=4",), small[1:]):
        config = Config.load("nano", overrides=overrides)
        said = lower_and_resume(phase, config)
        for key, now in re.findall(r"lower (\S+) \(now (\d+)\)", said):
            assert key in MAY_CHANGE
            assert int(now) > 1
        for key, value in re.findall(r"set (\S+) = (\S+)", said):
            assert key in MAY_CHANGE
            assert config.leaves()[key] != (value == "true")


@pytest.mark.parametrize("preset", ["nano", "qwen3.5-2b", "qwen3.5-9b", "smollm2-135m-study"])
def test_what_makes_a_run_smaller_is_accepted_and_not_set_already(preset: str) -> None:
    asked = [*smaller_weights(Config.load(preset)), *smaller_passes(Config.load(preset))]
    for key, value in re.findall(r"(?:use|set) (\S+) = (\S+)", " ".join(asked)):
        assert str(Config.load(preset).leaves()[key]).lower() != value
        changed = Config.load(preset, overrides=[f"{key}={value}"])
        assert f"{key} = {value}" not in " ".join([*smaller_weights(changed), *smaller_passes(changed)])


def test_doctor_recommends_nothing_that_is_set() -> None:
    small = Device("CPU", "cpu", 1 << 30, ["float32"])
    shown = "\n".join(render_fit(fit(["qwen3.5-9b"], (), small, 1e12)))
    assert "does not fit" in shown
    assert "actor.adapt = lora" not in shown
    assert "use actor.adapt = lora" in "\n".join(render_fit(fit(["qwen3.5-2b"], (), small, 1e12)))


def test_passes_are_captured_in_runs_that_need_half_of_what_they_can_get(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, loaded = configure(home), cast(Any, SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda"))))
    needed = SimpleNamespace(total=40)
    monkeypatch.setattr(memory_limits, "_shape", lambda loaded: "known")
    monkeypatch.setattr(memory_limits, "estimate", lambda config, shape, on_gpu: needed)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    assert engine_options(config, loaded) == config.engine.options()
    assert engine_options(config, loaded).replayed_passes
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.79)
    assert not engine_options(config, loaded).replayed_passes
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.8)
    assert engine_options(config, loaded).replayed_passes
    needed.total = 41
    assert engine_options(config, loaded) == replace(config.engine.options(), replayed_passes=False)
    needed.total = 1
    monkeypatch.setattr(memory_limits, "_shape", lambda loaded: None)
    assert not engine_options(config, loaded).replayed_passes


def test_a_run_goes_on_with_smaller_updates_and_says_so(
    home: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, most = Actor._read, [1]

    def short(actor: Actor, engine: TreeModel, some: Trajectories, *asked: Any, **options: Any) -> Any:
        if len(some.texts.tokens_BS) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(actor, engine, some, *asked, **options)

    monkeypatch.setattr(Actor, "_read", short)
    start.train(configure(home, *SETTINGS), tmp_path / "run", quiet=True)
    rows = configure(home, *SETTINGS).run.texts_per_pass
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    (said,) = [one["detail"] for one in events if one.get("event") == "memory"]
    assert said.endswith(f"1 texts a pass from here on instead of {rows} (run.texts_per_pass)")
    gains = [json.loads((folder / SUMMARY).read_text("utf-8")) for folder in (undisturbed, tmp_path / "run")]
    assert gains[0]["test_no_thought_loss_end"] == pytest.approx(gains[1]["test_no_thought_loss_end"], rel=1e-5)
    most[0] = 0
    with pytest.raises(RunFailed, match="out of memory in phase update") as failed:
        start.train(configure(home, *SETTINGS), tmp_path / "none", quiet=True)
    assert "texts_per_pass" not in str(failed.value)  # one text was tried
    assert "set engine.activation_checkpointing = true" in str(failed.value)


THINKING = ("window.windows=1", "calibration.mode=average", "qualify.attempts=1", "run.develop_items=4", "run.seed=2")


def hold(monkeypatch: pytest.MonkeyPatch, most: list[int]) -> None:
    """Have passes that read texts without gradients find no memory for more of them than that."""
    read = TreeModel.read

    def short(engine: TreeModel, some: TextBatch, *asked: Any) -> Any:
        if len(some.tokens_BS) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(engine, some, *asked)

    monkeypatch.setattr(TreeModel, "read", short)


def test_a_run_goes_on_with_smaller_sets_and_is_that_of_the_smaller_size(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, again = tmp_path / "small", tmp_path / "again"
    start.train(configure(home, *THINKING, "run.texts_per_rollout=2"), small, quiet=True)
    hold(monkeypatch, [2])
    start.train(configure(home, *THINKING, "run.texts_per_rollout=6"), again, quiet=True)
    # From the first measurement on, which did not fit: weights, gains of every item, and what was counted.
    (mine, other), (told, plain) = (final_state(one) for one in (small, again)), (lines(one) for one in (again, small))
    for name in ("method", "ledger"):
        same(mine[name], other[name])
    assert mine["recorder"]["amounts"] == other["recorder"]["amounts"]
    memory = [one for one in told if one.get("event") == "memory"]
    assert [one["detail"] for one in memory] == [
        "a set of texts did not fit and was made again: 2 texts a pass from here on instead of 6 "
        "(run.texts_per_rollout)"
    ]
    assert [one for one in told if one not in memory] == plain
    for split in ("develop", "test"):
        for path in (small / split).iterdir():
            same(load_file(path), load_file(again / split / path.name))


def test_a_set_of_which_one_text_does_not_fit_ends_the_run_and_what_was_tried_is_not_asked_for(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, advance = [99], Method.advance

    def advanced(method: Any) -> str:
        most[0] = 0 if method.phase == "collect" else 99
        return advance(method)

    hold(monkeypatch, most)
    monkeypatch.setattr(Method, "advance", advanced)
    asked = ("method=quiet-star-grpo", "thought.group=2", "window.probe=0", "run.texts_per_pass=2")
    for rows in ((), ("run.texts_per_rollout=6",)):
        most[0] = 99
        with pytest.raises(RunFailed) as failed:
            start.train(configure(home, *asked, *rows), tmp_path / str(len(rows)), quiet=True)
        # Other methods keep activations in this phase, which fewer texts of a pass with gradients make smaller.
        assert str(failed.value).startswith(
            "out of memory in phase collect (CUDA out of memory); lower run.texts_per_pass (now 2) or set "
            "engine.activation_checkpointing = true in the run's config.toml and go on with tfive resume"
        )
