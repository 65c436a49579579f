"""Tiled attention and the tiles of layouts by Triton's kernels, in Triton's interpreter on a processor.

`test_interpreted.py` runs it in a process of its own: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json

import torch
from interpreted_step import mend

from tfive.tree.fast.tiled import differences

if __name__ == "__main__":
    mend()
    print(json.dumps(differences(2, 1, 16, torch.device("cpu"), torch.bfloat16)))
