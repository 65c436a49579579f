"""What fused and trained blocks compute between their products by Triton's kernels, in Triton's interpreter on a
processor. `test_interpreted.py` runs it in a process of its own: Triton decides when it is imported whether it
interprets."""

from __future__ import annotations

import json

import torch
from interpreted_step import mend

from tfive.tree.fast import fused, training_ops

if __name__ == "__main__":
    mend()
    heads, like = fused.Heads(4, 2, 16, 16, True, False), (torch.device("cpu"), torch.float32)
    blocks = training_ops.BlockShape(heads, 64, 96)
    found = training_ops.differences(training_ops.TritonTraining(), blocks, *like)
    print(json.dumps(found | fused.differences(fused.TritonOps(), heads, *like)))
