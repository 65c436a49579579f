"""Triton's sampling step of recurrent layers agrees with PyTorch's where no GPU is: in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tfive.tree.fast.agreement import KERNEL_BOUNDS


def test_the_step_agrees_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="the interpreter is Triton's")
    script = Path(__file__).with_name("interpreted_step.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    apart = json.loads(ran.stdout)
    assert len(apart) == 4
    # Each by itself: NaN is no maximum.
    assert all(off < KERNEL_BOUNDS[torch.bfloat16] for off in apart[:3]), apart
    assert apart[3] < KERNEL_BOUNDS[torch.float32], apart
