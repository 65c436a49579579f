"""A profile by parts: how long each lasted and for how much of it the device worked, by spans made by hand."""

from __future__ import annotations

import torch

from tfive_lab.bench.profile import by_part, part, profiled


def test_a_part_is_told_with_the_devices_work_in_it_and_what_was_asked() -> None:
    # Microseconds; two kernels overlap, one runs on after its part is over.
    busy = [(100.0, 300.0), (200.0, 400.0), (900.0, 1_500.0), (5_000.0, 6_000.0)]
    parts = [("fit", (0.0, 1_000.0)), ("step", (250.0, 350.0)), ("fit", (1_400.0, 2_000.0)), ("idle", (3e3, 4e3))]
    asked = [("cudaLaunchKernel", 10.0), ("cudaLaunchKernelExC", 260.0), ("cudaGraphLaunch", 270.0),
             ("cudaStreamSynchronize", 999.0), ("cudaMemcpyAsync", 20.0), ("cudaLaunchKernel", 1_200.0)]  # fmt: skip
    found = by_part(parts, busy, asked)
    assert list(found) == ["fit", "step", "idle"]
    assert found["fit"] == {"calls": 2, "ms": 1.6, "busy_ms": 0.5, "kernels": 2, "graphs": 1, "waits": 1}
    assert found["step"] == {"calls": 1, "ms": 0.1, "busy_ms": 0.1, "kernels": 1, "graphs": 1, "waits": 0}
    assert found["idle"]["busy_ms"] == 0
    assert by_part([], busy, asked) == {}


def test_parts_are_recorded_and_count_as_nothing_themselves() -> None:
    def work() -> None:
        with part("outer"):
            with part("inner"):
                torch.ones(3).sum()
            torch.ones(3)

    found = profiled(work, torch.device("cpu"))
    assert set(found["parts"]) == {"outer", "inner"}
    assert found["parts"]["outer"]["ms"] >= found["parts"]["inner"]["ms"]
    assert 0 < found["parts"]["inner"]["busy_ms"] <= found["parts"]["inner"]["ms"]
    assert not any(kernel["name"].startswith("part: ") for kernel in found["kernels"])
