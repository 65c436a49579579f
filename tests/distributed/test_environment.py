"""A process's place among others: taken whole from the environment, or refused in one line."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch

from tfive.distributed import ports
from tfive.distributed.environment import Launched, launched
from tfive.distributed.launch import backend_of
from tfive.distributed.ports import free_port
from tfive.errors import UserError

WHOLE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "LOCAL_WORLD_SIZE": "4",
}


def test_the_place_is_read_whole() -> None:
    assert launched(WHOLE) == Launched(5, 8, 1, 2, "job-7", 3, 4)
    assert launched({}) == Launched()
    assert launched({}).first
    assert launched({"WORLD_SIZE": "1", "RANK": "0"}) == Launched()
    assert not launched(WHOLE).first


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "WORLD_SIZE = 8 without MASTER_ADDR, MASTER_PORT: there is no rendez"),
        ({"LOCAL_RANK": ""}, "WORLD_SIZE = 8 without LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = two: a whole number"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE = ²: a whole number"),
        ({"RANK": "8"}, "RANK = 8: it must be below WORLD_SIZE = 8"),
        ({"WORLD_SIZE": "0"}, "RANK = 5: it must be below WORLD_SIZE = 0"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT = -1: a whole number"),
    ],
)
def test_half_an_environment_is_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        launched(WHOLE | changed)


def test_a_launch_without_a_name_is_told_by_its_launcher() -> None:
    unnamed = launched(WHOLE | {"TORCHELASTIC_RUN_ID": "none"}).launch
    assert str(unnamed).endswith(f"-{os.getppid()}")
    assert launched({name: value for name, value in WHOLE.items() if "RUN_ID" not in name}).launch is None


def test_a_port_is_free_and_none_of_outgoing_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = free_port()
    assert found is not None
    assert ports.LOWEST <= found < int(ports.OUTGOING.read_text().split()[0])
    with socket.socket() as taken:
        taken.bind(("localhost", found))
        (tmp_path / "range").write_text(f"{found + 1} 60999")
        monkeypatch.setattr(ports, "OUTGOING", tmp_path / "range")
        monkeypatch.setattr(ports, "LOWEST", found)
        assert free_port() is None
    assert free_port() == found
    monkeypatch.setattr(ports, "OUTGOING", tmp_path / "none")
    assert free_port() is None


def test_processes_that_share_a_gpu_all_exchange_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def backends(processes: int, device: str = "cuda") -> set[str]:
        places = [Launched(rank, 8, rank, local_size=processes) for rank in range(processes)]
        return {backend_of(torch.device(device), place) for place in places}

    assert backends(2) == {"nccl"}
    assert backends(4) == backends(2, "cpu") == {"gloo"}
    assert backend_of(torch.device("cuda"), Launched(0, 8)) == "gloo"
