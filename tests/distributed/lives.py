"""Lives of one run by changing numbers of processes: stopped by a signal, gone on by fewer or more."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tfive.config.config import Config
from tfive.distributed.environment import Launched
from tfive.distributed.group import Group
from tfive.distributed.meeting import Meeting
from tfive.distributed.pieces import Box, Piece, piece_of
from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.rl.rollout import Draw, Rollout
from tfive.training import start
from tfive.training.begin import NEW, RESUMED, Begun
from tfive.training.checkpoint import CheckpointStore
from tfive.training.loop import Loop, WindowCallback
from tfive.training.progress import ProgressReport
from tfive.training.recorder import Recorder
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.status_files import Stopped
from tiny import configure
from training.test_resume import same

SETTINGS = (
    "method=quiet-star-ppo", "window.actor_steps=2", "window.items=8", "run.develop_items=4", "run.explorer_items=0",
    "text.sequences.development=2", "text.sequences.test=2", "text.positions.variance=0.5", "text.positions.pilot=16",
)  # fmt: skip


def live(
    world: World,
    home: Path,
    name: str,
    windows: int,
    stop_after: int | None = None,
    shard: int = 1,
    profile: str = "single",
    stop_ahead: int | None = None,
) -> None:
    """Start the run, or go on with it, and after some window ask the first process to stop. `shard` processes hold the
    weights and moments between them, 0 for all; `profile` says who has which. `stop_ahead`: stop in this window when a
    set was drawn while the critic was fitted."""
    folder = home / name
    resumed = (folder / CHECKPOINTS).exists()
    world.barrier("one life after another")
    divided = (f"distributed.shard={shard}", f"distributed.profile={profile}")
    config = configure(home, *SETTINGS, f"window.windows={windows}", *divided)

    def ahead(rollout: Rollout, draw: Draw) -> bool:
        if world.leads and draw.window == stop_ahead:
            os.kill(os.getpid(), signal.SIGTERM)
        return _DRAW_AHEAD(rollout, draw)

    Rollout.draw_ahead = ahead  # type: ignore[method-assign, assignment]

    def closed(report: dict[str, Any]) -> None:
        if report["window"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        _run(config, Begun(folder, RESUMED if resumed else NEW, None), world, closed)
        assert stop_after is stop_ahead is None
    except Stopped:
        assert (stop_after or stop_ahead) is not None
    assert not list((folder / CHECKPOINTS).glob(".*")), "a write was not waited for"


def _run(config: Config, begun: Begun, world: World, closed: WindowCallback) -> None:
    """What `start` does when the processes have met, by those of `world`."""
    met, progress = Meeting(Launched(world.rank, world.size)), ProgressReport(sys.stderr)
    if not world.leads:
        world.barrier("the prepared text")
    inputs = start._inputs(config, begun.folder, met, progress, model=None, texts=None, quiet=True, trust=False)
    if world.leads:
        begun.prepare(config, own=False)
        world.barrier("the prepared text")
    with Recorder(begun.folder if world.leads else None, quiet=True) as recorder:
        start._recorded(
            config, begun, inputs, recorder, world, progress, on_window=closed, quiet=True, skip_damaged=False
        )


def restored_exactly(loop: Loop, *, skip_damaged: bool = False) -> list[str]:
    """`Loop.restore`, after which every process holds what one process alone reads from the checkpoint."""
    lines = _RESTORE(loop, skip_damaged=skip_damaged)
    store = CheckpointStore(loop.store.root)
    state = loop.assembly.method.state_dict()
    same(_cut_alike(store.load(store.paths()[-1])["method"], state), _cut_alike(state, state))
    RESTORED.append(loop.world.size)
    return lines


def _cut_alike(tree: Any, like: Any) -> Any:
    """The tree with those parts of its tensors that `like` has of them."""
    if isinstance(like, Piece):
        PIECES.append(1)
        return tree.local if isinstance(tree, Piece) else tree[like.box.slices]
    if isinstance(like, dict):
        assert tree.keys() == like.keys()
        return {key: _cut_alike(tree[key], like[key]) for key in like}
    if isinstance(like, list | tuple):
        return [_cut_alike(*pair) for pair in zip(tree, like, strict=True)]
    return tree


_RESTORE = Loop.restore
_DRAW_AHEAD = Rollout.draw_ahead
RESTORED: list[int] = []
PIECES: list[int] = []


def every_life(world: World, home: str) -> dict[str, Any]:
    """A run by two that is undisturbed, and by two others that is stopped; the same by four with roles of their own,
    stopped in the middle of a window; then one by two for the actor and two for the critic, in shards, by two, by one,
    and by three for the actor, in shards, and one for the critic."""
    Loop.restore = restored_exactly  # type: ignore[method-assign, assignment]
    folder = Path(home)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = Group(torch.device("cpu"), groups[world.rank // 2])
    if world.rank < 2:
        live(pair, folder, "undisturbed", 2)
    else:
        live(pair, folder, "stopped", 2, stop_after=1)
        live(pair, folder, "stopped", 2)
    live(world, folder, "roles", 1, profile="cluster")
    live(world, folder, "roles stopped", 1, profile="cluster", stop_ahead=1)
    live(world, folder, "roles stopped", 1, profile="cluster")
    live(world, folder, "moved", 4, stop_after=1, shard=2, profile="cluster")
    if world.rank < 2:
        live(pair, folder, "moved", 4, stop_after=2)
    if world.rank == 0:
        launched = os.environ.pop("WORLD_SIZE")  # what a process that is started alone does not have
        live(SINGLE, folder, "moved", 4, stop_after=3)
        os.environ["WORLD_SIZE"] = launched
    world.barrier("alone")
    live(world, folder, "moved", 4, shard=0, profile="compact")
    return {"restored": RESTORED, "pieces": len(PIECES), "sharded": sharded(world, folder / "sharded")}


def sharded(world: World, root: Path) -> list[str]:
    """FSDP2 modules, flat and with copies across groups, written by four and read by one and by each for itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    said = []
    meshes = {
        "flat": init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)),
        "copies": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")),
    }
    for name, mesh in meshes.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
        whole = {key: value.clone() for key, value in model.state_dict().items()}
        fully_shard(model, mesh=mesh)
        store = CheckpointStore(root / name, world=world)
        store.begin({"model": dict(model.state_dict()), "plain": torch.arange(9)})
        # Collectives of training go on while the threads write.
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            assert world.any_of(True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(1)  # type: ignore[attr-defined]
        path = store.wait()
        assert path is not None
        alone = CheckpointStore(root / name).load(path)
        assert all(alone["model"][key].equal(value) for key, value in whole.items()), name
        pieces = {("model", key): piece_of(value).box for key, value in model.state_dict().items()}
        own = store.load(path, partial(_own_piece, pieces))
        for key, value in whole.items():
            assert own["model"][key].local.equal(value[pieces["model", key].slices]), (name, key)
        said.append(_refused(world, root / name))
    return said


def _own_piece(pieces: dict[Any, Box], path: tuple[str | int, ...], shape: tuple[int, ...]) -> Box | None:
    return pieces.get(path)


def _refused(world: World, root: Path) -> str:
    """A byte of one process's file is changed: every process refuses, with the same line."""
    world.barrier("all have read it")
    if world.leads:
        (file,) = root.glob("checkpoint-*/parts-00001-*")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
    world.barrier("changed")
    with pytest.raises(UserError) as error:
        CheckpointStore(root, world=world).usable()
    return str(error.value)
