"""Hybrids by Triton's kernels: agreement, seconds, mismatch by rounding, profile."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tfive.errors import UserError
from tfive.tree.fast.delta_kernel import triton_differences
from tfive.tree.settings import EngineOptions
from tfive_lab.bench.engine import mismatch
from tfive_lab.bench.phases import tree_phases
from tfive_lab.bench.profile import profiled
from tfive_lab.bench.recurrent_cases import heads_of
from tfive_lab.bench.timeline import seconds, timeline
from tfive_lab.bench.work import Work, find_model

start, out = time.perf_counter(), Path(sys.argv[1])
device, report = torch.device("cuda"), {}


def note(key: str, value: Any) -> None:
    report[key] = value
    shown = json.dumps(value)
    print(f"{time.perf_counter() - start:.1f} s {key}: {shown[:700]}", flush=True)
    (out / "hybrid.json").write_text(json.dumps(report, indent=1))


model, _ = find_model("qwen3.5-2b", device, torch.bfloat16)
side = tree_phases(model, Work(), EngineOptions(delta_rule="triton"))
try:
    note("rule", [side.tree.rule.name, side.tree.rule.reason])
except UserError as error:
    note("rule", str(error))
    note("apart", triton_differences(heads_of("qwen3.5-2b"), device, torch.bfloat16))
    plain = tree_phases(model, Work(), EngineOptions(delta_rule="torch"))
    side.tree._rule = plain.tree.rule
note("steps", [side.tree.fusion.reason, side.tree.fusion.steps])
note("training", side.tree.training.reason)
note("attention", [side.tree.kernel, side.tree.tiled_trouble])
fusion: Any = side.tree.fusion.fusion
for once in (True, False):
    fusion.once = once
    side.tree._samplers.clear()
    for _ in range(2):
        side.sampling()
    for _ in range(1 if once else 2):
        log_prob = side.actor()
    note(f"mismatch once={once}", mismatch(side.thoughts.log_q_BRT.flatten(0, 1), log_prob))
    note(f"sampling once={once}", seconds(side.sampling, device, 3))
    note(f"ten steps once={once}", seconds(side.ten_steps, device, 3))
side.sampling()
side.scoring()
side.scoring()
note("scoring", seconds(side.scoring, device, 3))
note("actor", seconds(side.actor, device, 3))
other = tree_phases(model, Work(), EngineOptions(delta_rule="torch"))
other.tree.share_fusion(side.tree)
with torch.no_grad():
    plain_log_prob: Any = other.tree.policy(side.texts, side.thoughts).log_prob_BRT
note("mismatch once=False, torch rule", mismatch(side.thoughts.log_q_BRT.flatten(0, 1), plain_log_prob.flatten(0, 1)))
fusion.once = True
side.tree._samplers.clear()
side.sampling()
with torch.no_grad():
    plain_log_prob = other.tree.policy(side.texts, side.thoughts).log_prob_BRT
note("mismatch once=True, torch rule", mismatch(side.thoughts.log_q_BRT.flatten(0, 1), plain_log_prob.flatten(0, 1)))
for phase in ("ten_steps", "scoring", "sampling", "actor"):
    note(f"profile {phase}", profiled(getattr(side, phase), device))
for phase in ("scoring", "sampling"):
    note(f"timeline {phase}", timeline(getattr(side, phase), device))
