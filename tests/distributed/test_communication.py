"""What processes send each other: formulae held against a counted run, and rings reckoned by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from processes import run_world

from tfive.cli.app import _call
from tfive.cli.doctor_processes import processes_facts
from tfive.config.config import Config, resolve
from tfive.distributed.environment import Launched
from tfive.errors import UserError
from tfive.models.shape import ModelShape, find_shape
from tfive.training import memory_limits
from tfive.training.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    FUSED,
    REDUCE_SCATTER,
    Exchange,
    Layout,
    Network,
    bytes_by_role,
    bytes_per_rank,
    exchanges,
    predicted,
    whole_copies,
)
from tfive.training.memory import estimate
from tfive.training.memory_limits import check_copies, processes_on
from tiny import configure

QUICK = (
    "window.probe=0",
    "gate.passes=0",
    "qualify.rule=fixed",
    "critic.warmup_rounds=1",
    "calibration.cross_fit=false",
    "calibration.steps=2",
    "calibration.warm_steps=2",
    "window.actor_steps=2",
)
CASES = {"whole": [*QUICK], "shards": [*QUICK, "distributed.shard=0"]}


def by_collective(config: Config, processes: int) -> dict[str, int]:
    shape = find_shape(config.model.name)
    assert shape is not None
    found: dict[str, int] = {}
    for one in exchanges(config, shape, Layout.of(config, processes), 4):
        found[one.collective] = found.get(one.collective, 0) + one.total
    return found


def test_predicted_bytes_are_those_of_a_counted_window(tmp_path: Path) -> None:
    configure(tmp_path)
    counted = run_world(2, "counted:windows", str(tmp_path), CASES, limit=400.0)
    for name, overrides in CASES.items():
        expected = by_collective(configure(tmp_path, *overrides), 2)
        found, traced = counted[0][name]["counted"], counted[0][name]["traced"]
        sums = found.get(ALL_REDUCE, 0) + found.get(REDUCE_SCATTER, 0)
        assert (traced["all_reduce"], traced["all_gather"]) == (sums, found[ALL_GATHER])
        for collective in (ALL_REDUCE, REDUCE_SCATTER):
            # Shards are padded to equal rows, at most one of each tensor a process.
            assert expected.get(collective, 0) <= found.get(collective, 0) <= 1.1 * expected.get(collective, 0), name
        # The model is tiny: sums and agreements, which are not counted, are not small beside it.
        assert 0.75 < expected[ALL_GATHER] / found[ALL_GATHER] <= 1.05, name


WHOLE = ["actor.adapt=full", "critic.adapt=full"]
"""Every weight trained, as in the paper."""


@pytest.fixture(scope="module")
def nine() -> tuple[Config, ModelShape]:
    config = resolve(["qwen3.5-9b"], WHOLE).config
    shape = find_shape(config.model.name)
    assert shape is not None
    return config, shape


def test_a_ring_passes_each_member_all_but_one_part() -> None:
    network = Network(inside=100.0, between=10.0)
    node, nodes = Layout(8), Layout(24, nodes=3)
    assert network.seconds(Exchange(ALL_REDUCE, "", 2, 400, 8), node) == pytest.approx(2 * 2 * 400 * 7 / 8 / 100)
    assert network.seconds(Exchange(ALL_GATHER, "", 1, 50, 8), node) == pytest.approx(50 * 7 / 100)
    assert network.seconds(Exchange(REDUCE_SCATTER, "", 1, 400, 8), nodes) == pytest.approx(400 * 7 / 8 / 100)
    across = 2 * 400 * (7 / 8 / 100 + 2 / 3 / 10)
    assert network.seconds(Exchange(ALL_REDUCE, "", 1, 400, 24), nodes) == pytest.approx(across)
    # Three holders of a shard, one a node; all eight of a node send theirs over one link.
    assert network.seconds(Exchange(ALL_REDUCE, "", 1, 50, 3, copies=True), nodes) == pytest.approx(
        2 * 8 * 50 * 2 / 3 / 10
    )


def test_shards_take_memory_down_and_roles_change_what_is_sent(nine: tuple[Config, ModelShape]) -> None:
    config, shape = nine
    table = estimate(config, shape, on_gpu=True)
    sizes = [bytes_per_rank(table, config, shape, Layout(24, shard=shard), 2) for shard in (1, 2, 8, 24)]
    assert sizes[0] == table.total
    assert sizes == sorted(sizes, reverse=True)
    # What is sharded falls as 1/N: masters and moments of the actor and of two full critics, and the gradients of
    # whoever takes most while it works.
    weights = shape.parameters + 2 * (shape.backbone + shape.hidden + config.thought.length + 3)
    fallen = (12 * weights + 4 * shape.parameters) * (1 / 2 - 1 / 8)
    assert sizes[1] - sizes[2] == pytest.approx(fallen, rel=0.01)
    # A critic's own process sums with nobody, and tells the others what it says of each thought.
    compact = exchanges(config, shape, Layout(8, fitting=1, critics=2), 2)
    assert [(one.collective, one.times) for one in compact if "critics" in one.what] == [(BROADCAST, 2)]
    (acting,) = (one for one in compact if "gradients" in one.what)
    assert acting.group == 6
    # The actor's processes have nothing of the critics and the critics' nothing of the actor, but both the base.
    roles = bytes_by_role(table, config, shape, Layout(8, fitting=1, critics=2), 2)
    critic = 18 * (shape.backbone + shape.hidden + config.thought.length + 3)
    assert table.total - roles["actor"] == pytest.approx(2 * 14 * critic / 18, rel=0.05)
    assert roles["critic"] > critic + 2 * shape.parameters
    assert exchanges(config, shape, Layout(1), 2) == []


def test_more_gpus_compute_faster_and_exchange_longer(nine: tuple[Config, ModelShape]) -> None:
    config, shape = nine
    node, nodes = (predicted(config, shape, Layout(count, nodes=count // 8, shard=8)) for count in (8, 24))
    assert nodes.computing == pytest.approx(node.computing / 3)
    assert nodes.exchanging > node.exchanging
    roles = predicted(config, shape, Layout(8, fitting=1, critics=2))
    assert roles.computing > node.computing
    assert node.step == pytest.approx((node.computing + node.exchanging) / config.window.actor_steps)


def test_doctor_predicts_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    whole = [word for one in WHOLE for word in ("--set", one)]
    words = ["doctor", "qwen3.5-9b", "--processes", "24", *whole]
    assert _call([*words, "--set", "distributed.shard=8", "--profile", "cluster", "--json"]) == 0
    several = json.loads(capsys.readouterr().out)["configuration"]["several"]
    assert (several["processes"], several["nodes"], several["shard"], several["profile"]) == (24, 3, 8, "cluster")
    assert several["seconds"]["step"] > 0
    assert any("gradients of the actor" in line for line in several["shown"])
    # Groups end where nodes do.
    assert [line.partition(":")[0] for line in several["duties"]] == ["ranks 0–15", "ranks 16–19", "ranks 20–23"]
    assert set(several["bytes_by_role"]) == set(several["whole_copies"]) == {"actor", "critic"}
    assert several["bytes"] == max(several["bytes_by_role"].values()) > sum(several["whole_copies"]["actor"].values())
    assert several["fits"]
    assert several["shown"][-1] == "fits on GPUs of 131.32 GiB"
    assert _call([*words, "--set", "distributed.shard=7"]) == 2
    assert "distributed.shard = 7: 24 processes cannot be divided" in capsys.readouterr().err
    assert _call(["doctor", "--processes", "2"]) == 2
    assert "name the preset or file" in capsys.readouterr().err


SEVENTY = ["model.name=Llama-3.1-70B", *WHOLE, "distributed.shard=0"]


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        (
            [],
            r"no shard makes it fit: whole copies take 604\.26 GiB \(frozen base .*, actor .* critic 2 .*\) of a ",
        ),
        (
            ["distributed.profile=cluster"],
            r"no shard makes it fit: whole copies take 345\.33 GiB .*use a smaller model",
        ),
        (
            ["model.name=Qwen/Qwen3.5-9B-Base", "distributed.shard=1"],
            r"does not fit on GPUs.*; use distributed\.shard = 0 ",
        ),
    ],
)
def test_doctor_says_in_a_line_why_a_model_does_not_fit(more: list[str], verdict: str) -> None:
    config = resolve(["qwen3.5-9b"], [*SEVENTY, *more]).config
    shape = find_shape(config.model.name)
    assert shape is not None
    found = processes_facts(config, shape, 24)
    assert not found["fits"]
    assert re.search(verdict, found["shown"][-1]), found["shown"][-1]


def test_what_no_shard_makes_smaller_is_listed(nine: tuple[Config, ModelShape]) -> None:
    config, shape = nine

    def copies(*overrides: str, layout: Layout | None = None) -> dict[str, dict[str, int]]:
        own = resolve(["qwen3.5-9b"], [*WHOLE, *overrides]).config
        return whole_copies(estimate(own, shape, on_gpu=True), own, shape, layout or Layout(8, shard=8), 2)

    assert set(copies()["all"]) == {"frozen base", "actor", FUSED, "critic 1", "critic 2"}
    assert set(copies("engine.fast=off")["all"]) == {"frozen base", "actor", "critic 1", "critic 2"}
    assert copies("method=rlp")["all"]["EMA teacher"] == 2 * shape.parameters
    assert copies("calibration.score_centering=true")["all"]["policy before the update"] == 2 * shape.parameters
    apart = copies(layout=Layout(8, fitting=1, critics=2))
    assert (set(apart["actor"]), set(apart["critic"])) == ({"frozen base", "actor", FUSED}, {"frozen base", "critic 1"})
    # A teacher's average is spread like the masters that it follows, and put together once a window.
    rlp = resolve(["qwen3.5-9b"], [*WHOLE, "method=rlp"]).config
    table = estimate(rlp, shape, on_gpu=True)
    (row,) = (row for row in table.rows if row.role == "EMA teacher")
    assert row.bytes["weights"] == 6 * shape.parameters
    two, eight = (bytes_per_rank(table, rlp, shape, Layout(8, shard=shard), 2) for shard in (2, 8))
    assert two - eight == pytest.approx((4 + 8 + 4 + 4) * shape.parameters * (1 / 2 - 1 / 8), rel=0.01)
    (sent,) = (one for one in exchanges(rlp, shape, Layout(8, shard=8), 2) if "teacher" in one.what)
    assert (sent.collective, sent.total) == (ALL_GATHER, 4 * math.ceil(shape.parameters / 8))
    # The policy before the update is in no shard.
    centred = resolve(["qwen3.5-9b"], [*WHOLE, "calibration.score_centering=true"]).config
    tables = [(one, estimate(one, shape, on_gpu=True)) for one in (config, centred)]
    plain, kept = (bytes_per_rank(table, one, shape, Layout(8, shard=8), 2) for one, table in tables)
    assert kept - plain == 2 * shape.parameters


def test_whole_copies_that_cannot_be_held_are_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(["qwen3.5-9b"], [*SEVENTY, "model.name=Llama-3.1-70B"]).config
    monkeypatch.setattr(memory_limits, "device_memory", lambda device: 500 * 2**30)
    cpu, alone, four = torch.device("cpu"), Launched(), Launched(0, 8, local_size=4)
    assert processes_on(cpu, four) == 4
    with pytest.raises(
        UserError, match=r"cpu has 125\.00 GiB for each of 4 processes, and shards do not make them smaller; "
    ):
        check_copies(config, cpu, four)
    with pytest.raises(
        UserError, match=r"model\.name = Llama-3\.1-70B: whole copies of weights take 521\.76 GiB \(frozen"
    ):
        check_copies(config, cpu, alone)
    monkeypatch.setattr(memory_limits, "device_memory", lambda device: 525 * 2**30)
    check_copies(config, cpu, alone)
    check_copies(resolve(["nano"], []).config, cpu, four)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [processes_on(torch.device("cuda"), Launched(0, 8, local_size=size)) for size in (4, 5, 8, 0)] == [
        1,
        2,
        2,
        2,
    ]


def test_layouts_that_cannot_be_are_refused(nine: tuple[Config, ModelShape]) -> None:
    config = resolve(["qwen3.5-9b"], ["distributed.profile=cluster"]).config
    with pytest.raises(UserError, match="2 critics with 1 process each need 3 processes, this run has 2"):
        Layout.of(config, 2)
