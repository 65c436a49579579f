"""A run that is killed anywhere, again and again, ends bit for bit where an undisturbed one ends."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tfive.config.config import Config
from tfive.distributed.environment import Launched
from tfive.distributed.meeting import Meeting
from tfive.errors import RunFailed, UserError
from tfive.methods.registry import spec_of
from tfive.training import start
from tfive.training.begin import NEW, Begun
from tfive.training.checkpoint import CheckpointStore
from tfive.training.loop import Loop, Stopped
from tfive.training.run_folder import CHECKPOINTS
from tfive.tree.forward import TreeModel
from tiny import configure

QUICK = (
    "run.seed=2",
    "window.qualify=1.0",
    "window.windows=3",
    "critic.head_lr=3e-2",
    "critic.lr=1e-3",
    "qualify.rule=sustained",
    "qualify.patience=9",
    "run.checkpoint_phases=true",
    "run.keep=3",
)
PHASES = spec_of("t5").phases
SAVES = ("before-write", "mid-write", "before-rename", "after-rename", "mid-prune")


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Processes die here, the machine does not: what was written stays visible without `fsync`, which costs a sixth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def config(home: Path) -> Config:
    return configure(home, *QUICK)


@pytest.fixture(scope="module")
def undisturbed(home: Path, config: Config) -> Path:
    start.train(config, home / "undisturbed", quiet=True)
    return home / "undisturbed"


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics without clocks."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key.rpartition(".")[2] != "seconds"} for row in rows]


def same(left: Any, right: Any, path: str = "") -> None:
    """Equal trees, tensors bit for bit; clock fields are left out."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            if key not in ("seconds", "wall_seconds", "metrics_bytes", "metrics_sha256"):
                same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for number, pair in enumerate(zip(left, right)):
            same(*pair, f"{path}/{number}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    elif hasattr(left, "shape"):
        assert (left == right).all(), path
    else:
        assert left == right or (left != left and right != right), path


def kept_for_the_page(folder: Path) -> dict[str, Any]:
    """The thoughts that were kept, byte for byte, and the costs without the clock."""
    files = {path.name: path.read_bytes() for path in (folder / "explorer").iterdir()}
    costs = [json.loads(line) for line in (folder / "costs.jsonl").read_text("utf-8").splitlines()]
    return files | {"costs": [{key: value for key, value in cost.items() if key != "seconds"} for cost in costs]}


def final_state(folder: Path) -> Any:
    found = CheckpointStore(folder / CHECKPOINTS).newest()
    assert found.checkpoint is not None
    return found.checkpoint.tree


def killer(phase: str, point: str) -> Callable[[str], None]:
    """A fault hook that ends this process with SIGKILL: at a phase's start, inside it, or inside a save after it."""
    seen = {"phase": False}

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(where: str) -> None:
        if where.startswith("phase:"):
            seen["phase"] = seen["phase"] or where == f"phase:{phase}"
            if seen["phase"] and point == "start":
                die()
            if where == f"phase:{phase}" and point == "inside":
                grown = TreeModel._grow
                calls = iter(range(10_000))

                def dying(self: TreeModel, *arguments: Any, **options: Any) -> Any:
                    if next(calls) == 2:
                        die()
                    return grown(self, *arguments, **options)

                TreeModel._grow = dying  # type: ignore[method-assign, assignment]
        elif seen["phase"] and where == point:
            die()

    return hook


def in_a_child(
    folder: Path, config: Config, hook: Callable[[str], None] | None, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Start or resume the run in a forked process; its wait status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if hook is not None:
                made = Loop.__init__

                def with_faults(self: Loop, *arguments: Any, **options: Any) -> None:
                    made(self, *arguments, **{**options, "faults": hook})

                monkeypatch.setattr(Loop, "__init__", with_faults)
            begun = (folder / CHECKPOINTS).exists() and CheckpointStore(folder / CHECKPOINTS).paths()
            start.resume(folder, quiet=True) if begun else start._run(
                config, Begun(folder, NEW, None), Meeting(Launched()), on_window=None, quiet=True, trust=False
            )
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def test_thirty_kills_in_one_run(
    home: Path, config: Config, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_engine = [phase for phase in PHASES if phase not in ("open",)]
    plan = [(phase, "start") for phase in PHASES] + [(phase, "inside") for phase in with_engine]
    plan += [(phase, SAVES[number % len(SAVES)]) for number, phase in enumerate((*PHASES, *PHASES))]
    order = {phase: number for number, phase in enumerate(PHASES)}
    plan.sort(key=lambda pair: order[pair[0]])
    folder = home / "killed"
    killed: Counter[str] = Counter()
    for phase, point in plan:
        status = in_a_child(folder, config, killer(phase, point), monkeypatch)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            killed[phase] += 1
        else:
            assert status == 0, f"{phase}/{point}: the run failed by itself"
    assert in_a_child(folder, config, None, monkeypatch) == 0
    with capsys.disabled():
        print(f"\nkills by phase: {dict(killed)}, {sum(killed.values())} in all")
    assert sum(killed.values()) >= 30
    assert all(killed[phase] for phase in PHASES)
    same(final_state(undisturbed), final_state(folder))
    assert lines(undisturbed) == lines(folder)
    kept = kept_for_the_page(undisturbed)
    assert {f"window-{window:05d}.safetensors" for window in (0, 2, 3)} < set(kept)
    assert kept == kept_for_the_page(folder)


@pytest.mark.parametrize("method", ["ntp", "anchor-only", "quiet-star-ppo", "quiet-star-grpo", "rlp"])
def test_every_method_goes_on_exactly(home: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = ("thought.group=2",) if method in ("quiet-star-grpo", "rlp") else ()
    config = configure(home, *QUICK, f"method={method}", "window.windows=2", "anchor.conditioned=0.5", *group)
    start.train(config, home / method, quiet=True)
    folder = home / f"{method}-killed"
    for phase, point in (("collect", "mid-write"), ("update", "inside"), ("close", "start")):
        status = in_a_child(folder, config, killer(phase, point), monkeypatch)
        assert os.WIFSIGNALED(status), f"{phase}/{point} was never reached"
    assert in_a_child(folder, config, None, monkeypatch) == 0
    same(final_state(home / method), final_state(folder))
    assert lines(home / method) == lines(folder)
    assert kept_for_the_page(home / method) == kept_for_the_page(folder)
    if method == "rlp":
        teacher = final_state(folder)["method"]["teacher"]
        assert teacher["updates"] == 1 + 2 * config.window.actor_steps
        assert {tensor.dtype for tensor in teacher["average"].values()} == {torch.float32}


def test_a_signal_saves_and_says_how_to_go_on(home: Path, config: Config, undisturbed: Path) -> None:
    folder = home / "signalled"
    calls = iter(range(10_000))

    def hook(where: str) -> None:
        if where == "phase:update" and next(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    patched = Loop.__init__
    Loop.__init__ = lambda self, *a, **o: patched(self, *a, **{**o, "faults": hook})  # type: ignore[method-assign]
    try:
        with pytest.raises(Stopped, match="go on with: tfive resume"):
            start.train(config, folder, quiet=True)
    finally:
        Loop.__init__ = patched  # type: ignore[method-assign]
    status = json.loads((folder / "status.json").read_text("utf-8"))
    assert (status["state"], status["window"], status["phase"]) == ("stopped", 1, "update")
    start.resume(folder, quiet=True)
    same(final_state(undisturbed), final_state(folder))
    assert json.loads((folder / "status.json").read_text("utf-8"))["state"] == "done"


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete"])
def test_a_damaged_checkpoint_is_skipped_or_refused(home: Path, undisturbed: Path, tmp_path: Path, harm: str) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    (folder / "summary.json").unlink()
    for checkpoint in sorted((folder / CHECKPOINTS).iterdir()):
        for file in sorted(checkpoint.iterdir()):
            if harm == "truncate":
                file.write_bytes(file.read_bytes()[:-1])
            elif harm == "delete":
                file.unlink()
            else:
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 1
                file.write_bytes(bytes(content))
            break
    with pytest.raises(UserError, match="no usable checkpoint"):
        start.resume(folder, quiet=True)


def test_a_folder_in_use_is_refused(undisturbed: Path, config: Config) -> None:
    with pytest.raises(UserError, match="already holds a finished run; name another folder with --out"):
        start.train(config, undisturbed, quiet=True)


def test_resume_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run here"):
        start.resume(tmp_path)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written beside training; the run hears of it at its next step, and goes on later from the one before."""
    config, folder = configure(home, *QUICK, "method=ntp", "window.windows=2"), home / "unwritten"
    files = iter(range(10_000))

    def full(where: str) -> None:
        if where == "mid-write" and next(files) >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        made = Loop.__init__
        patch.setattr(Loop, "__init__", lambda self, *a, **o: made(self, *a, **{**o, "faults": full}))
        with pytest.raises(
            RunFailed, match=r"no checkpoint could be written in .*: No space left on device; free"
        ) as error:
            start.train(config, folder, quiet=True)
    assert "\n" not in str(error.value)
    status = json.loads((folder / "status.json").read_text("utf-8"))
    assert (status["state"], status["failure"]) == ("failed", str(error.value))
    assert [path.name for path in (folder / CHECKPOINTS).iterdir()] == ["checkpoint-00000001"]
    assert start.resume(folder, quiet=True)["windows"] == 2
