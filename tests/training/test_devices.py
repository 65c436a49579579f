"""Choosing where and how precisely to compute, and making the choice effective."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.training import start
from tfive.training.devices import Placement, kernels_named, place, usable_cores


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic
    fill = filling.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    filling.fill_uninitialized_memory = fill


def test_cpu_computes_in_float32_deterministically() -> None:
    chosen = place("cpu")
    assert chosen.device == torch.device("cpu")
    assert chosen.compute == torch.float32
    assert chosen.deterministic
    assert place("cpu", "bfloat16").compute == torch.bfloat16


def test_gpu_is_chosen_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulation=True: True)
    assert place("cuda:1").device == torch.device("cuda", 1)
    chosen = place()
    assert chosen.device == torch.device("cuda", 0)
    assert chosen.compute == torch.bfloat16
    assert not chosen.deterministic
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulation=True: emulation)
    assert place().compute == torch.float32
    with pytest.raises(UserError, match="asks for GPU 2, this machine has 2"):
        place("cuda:2")


def test_deterministic_kernels_are_asked_for_on_gpus_and_always_on_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulation=True: True)
    assert place("cuda", deterministic=True).deterministic
    assert not place("cuda").deterministic
    assert place("cpu", deterministic=False).deterministic
    assert not Config().run.deterministic


def test_a_kernel_that_is_not_deterministic_is_named() -> None:
    torch_says = "histc_cuda does not have a deterministic implementation, but you set 'torch.use_deterministic_…'"
    with (
        pytest.raises(RunFailed, match=r"run\.deterministic: the kernel histc_cuda has no .* run\.deterministic=false"),
        kernels_named(),
    ):
        raise RuntimeError(torch_says)
    with pytest.raises(RuntimeError, match="out of memory"), kernels_named():
        raise RuntimeError("out of memory")


def test_apply_sets_threads_seeds_and_determinism() -> None:
    chosen = replace(place("cpu"), threads=1)
    chosen.apply(seed=2**40 + 7)
    first = torch.rand(3), np.random.rand(3)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    chosen.apply(seed=2**40 + 7)
    assert torch.rand(3).equal(first[0])
    assert (np.random.rand(3) == first[1]).all()
    chosen.apply(seed=8)
    assert not torch.rand(3).equal(first[0])


def test_a_callers_autocast_does_not_reach_us() -> None:
    chosen = place("cpu")
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with chosen.no_autocast():
            assert (x @ x).dtype == torch.float32


def test_description_is_plain_and_complete() -> None:
    found = Placement(torch.device("cpu"), torch.bfloat16, 3, True).describe()
    assert found == {
        "device": "cpu", "device_name": "cpu", "compute": "bfloat16", "threads": 3, "deterministic": True,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "2"), ("RANK", "1"), ("WORLD_SIZE", "two")])
def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert place("cpu").device == torch.device("cpu")
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name} = {value}: this command works in one process"):
        place("cpu")


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert usable_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert 1 <= usable_cores() < 100000
    monkeypatch.setenv("OMP_NUM_THREADS", "junk")
    assert usable_cores() >= 1
    assert place("cpu").threads == usable_cores()
    assert place("cpu", threads=100_000).threads == usable_cores()
    assert place("cpu", threads=1).threads == 1
    monkeypatch.setattr("tfive.training.devices.usable_cores", lambda: 8)
    alone: Any = SimpleNamespace(place=SimpleNamespace(size=1, local_rank=0))
    for override, threads in (("run.threads=3", 3), ("run.threads=99", 8), ("run.seed=1", 1)):
        assert start._placed(Config.load("nano", overrides=(override,)), alone).threads == threads
