"""Weights in shards give the run of one process that has them whole, hold a share of the memory, and fall into none of
the traps that FSDP2 has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import course
from processes import run_world
from sharded import UPDATES, bytes_held, trained
from test_same_run import QUICK

from stage import llama
from tfive.distributed.world import SINGLE

pytestmark = pytest.mark.model

RUNS = {
    "whole critics": [*QUICK, "method=t5", "critic.adapt=full", "thought.delimiters=learned"],
    "a teacher": [*QUICK, "method=rlp"],
}


def whole_bytes() -> int:
    """Bytes of masters, moments and gradients of one process that holds them whole."""
    alone = trained(llama(blocks=2))
    alone.backward(0, 2)
    alone.optimizer.step()
    alone.backward(0, 2)
    return bytes_held(alone)


def check_exactness(found: list[dict[str, Any]], size: int) -> None:
    for one in found:
        assert one.pop("pointers stay")
        held = one.pop("bytes")
        print(f"{size} processes: {held} of {whole_bytes()} bytes of masters, moments and gradients")
        assert held <= 1.03 * whole_bytes() / size
        assert all(far <= 1e-12 for course in one.values() for far in course.values()), one


def test_two_processes(tmp_path: Path) -> None:
    alone = {name: course(SINGLE, str(tmp_path), overrides, name, windows=1) for name, overrides in RUNS.items()}
    sharded = {name: [*overrides, "distributed.shard=0"] for name, overrides in RUNS.items()}
    found = run_world(2, "sharded:everything", str(tmp_path), sharded, limit=300.0)
    check_exactness([one["exactness"] for one in found], 2)
    assert found[0]["states"] == found[1]["states"]
    check_precisions(found[0]["precisions"])
    check_states(found[0]["states"])
    check_traps(found[0]["traps"])
    for one in found:
        check_averages(one["averages"])
        own, whole = one["teaching"]
        assert own <= 1.03 * whole / 2
    assert set(found[0]["actors"]) == set(UPDATES)
    assert all(far <= 1e-12 for update in found[0]["actors"].values() for far in update), found[0]["actors"]
    for name, run in alone.items():
        assert found[0]["runs"][name]["weights"] == found[1]["runs"][name]["weights"]
        check_run(run, found[0]["runs"][name])


def check_precisions(found: dict[str, Any]) -> None:
    """FSDP over a group of one is no FSDP, bit for bit; shards and copies round stochastically as one does."""
    for dtype in ("float32", "bfloat16"):
        assert found[f"{dtype} alone"]
        assert found[f"{dtype} masters"] == 0.0
    for name in ("in shards", "each"):
        assert found[f"stochastic, {name}"] == found[f"moments, {name}"] == 0.0
        assert found[f"stochastic norm, {name}"] < 1e-6


def check_states(found: dict[str, Any]) -> None:
    """What shards save, a whole optimizer loads, and the other way round; norms are added up in another order."""
    for dtype, state in found.items():
        assert state["loads"]
        assert ("master" in state["keys"]) == (dtype == "bfloat16")
        assert {"gradient", "first", "apart_first"} <= set(state["keys"])
        assert state["norms"] <= (1e-15 if dtype == "float64" else 1e-6)
        assert state["masters"] <= (1e-15 if dtype == "float64" else 1e-7)
        assert state["pieces"] == 0.0


def check_traps(found: dict[str, Any]) -> None:
    """Weights travel once an update and never for a pass; one process's bad gradient is everyone's skipped update."""
    assert found["sampling"] == found["pass"] == 0
    assert found["warned"] == []
    assert found["update"] == found["units"] + 1  # and the norm
    assert found["bad rank"] == [False, 1, 0.0]
    assert found["lost copy"] == ["PeerLost", "gradients: Connection closed by peer", "gradients"]
    indivisible, mixed = found["refused"]
    assert "distributed.shard = 3: 2 processes" in indivisible
    assert "weights of several precisions (torch.bfloat16, torch.float32)" in mixed


def check_averages(found: dict[str, Any]) -> None:
    """A process averages its share of the rows; no more than two weights are whole at a time when a run ends."""
    assert found["apart"] <= 1e-12
    assert found["restored"] <= 1e-12
    whole, own = found["bytes"]
    assert own <= 1.03 * whole / 2
    assert found["change"] < 1e-12
    assert found["most at a time"] <= 2


def check_run(alone: dict[str, Any], shared: dict[str, Any]) -> None:
    """A window with actor and critics in shards: the same thoughts, decisions and weights."""
    for name in ("phases", "events", "thoughts"):
        assert shared[name] == alone[name], name
    assert alone["gradients"]
    for one, other in zip(alone["weights"], shared["weights"], strict=True):
        assert abs(one - other) <= 1e-10 * max(1.0, abs(one))  # learned delimiters are float32
    for one, other in zip(alone["reports"], shared["reports"], strict=True):
        for key, value in one.items():
            assert math.isclose(value, other[key], rel_tol=1e-5, abs_tol=1e-5) or math.isnan(value), key


def test_four_processes() -> None:
    check_exactness(run_world(4, "sharded:exactness", limit=300.0), 4)


def test_pieces_round_stochastically_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfive.rl import rounding

    monkeypatch.setattr(rounding, "CHUNK", 64)
    source = torch.randn(300, generator=torch.Generator().manual_seed(1))
    whole = torch.empty(300, dtype=torch.bfloat16)
    key: dict[str, Any] = {"seed": 3, "step": 5, "number": 7}
    rounding.round_stochastically(source, whole, **key)
    for cut in (1, 63, 64, 65, 200):
        parts = [torch.empty(cut, dtype=torch.bfloat16), torch.empty(300 - cut, dtype=torch.bfloat16)]
        rounding.round_stochastically(source[:cut], parts[0], **key)
        rounding.round_stochastically(source[cut:], parts[1], **key, first=cut)
        assert torch.cat(parts).equal(whole)
