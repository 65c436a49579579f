"""Triton's kernels agree with PyTorch where no GPU is: in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tfive.tree.fast.agreement import KERNEL_BOUNDS


def interpreted(script: str) -> Any:
    """What a script beside this file prints as JSON."""
    pytest.importorskip("triton", reason="the interpreter is Triton's")
    path = Path(__file__).with_name(script)
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_sampling_step_of_recurrent_layers_agrees() -> None:
    apart = interpreted("interpreted_step.py")
    assert len(apart) == 6
    # Each by itself: NaN is no maximum.
    assert all(off < KERNEL_BOUNDS[torch.bfloat16] for off in apart[:-1]), apart
    assert apart[-1] < KERNEL_BOUNDS[torch.float32], apart


def test_tiled_attention_agrees_and_finds_the_tiles_of_layouts() -> None:
    apart = interpreted("interpreted_tiles.py")
    assert len(apart) == 5
    assert apart.pop("tiles of layouts") == 0
    assert all(off < KERNEL_BOUNDS[torch.bfloat16] for off in apart.values()), apart


def test_kernels_between_products_agree() -> None:
    apart = interpreted("interpreted_blocks.py")
    assert len(apart) > 20
    assert all(off < KERNEL_BOUNDS[torch.float32] for off in apart.values()), apart
