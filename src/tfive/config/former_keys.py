"""Keys and presets there once were. A file or `--set` that still names one is refused with what became of it."""

from __future__ import annotations

_FIXED = "gone; its default is a constant now"

FORMER_KEYS: dict[str, str] = {
    "model.trust_remote_code": "gone; no file can allow it, only --trust-remote-code on the command line",
    "text.seed": "gone; all runs share one corpus, run.seed decides the rest",
    "text.split_by": "now split_by of a source in text.sources",
    "text.positions.entropy_quantile": f"{_FIXED} (0.8)",
    "text.positions.pattern_reach": f"{_FIXED} (256 characters)",
    "text.positions.min_context": f"{_FIXED} (1 token)",
    "engine.attention": "gone; engine.fast = off is transformers' masked attention, anything else folded",
    "engine.delta_rule": "gone; engine.fast = off is the PyTorch rule, else kernels where they are sound",
    "engine.fused_norms": "now part of engine.fast (auto, on or off)",
    "engine.fused_blocks": "now part of engine.fast (auto, on or off)",
    "engine.cuda_graphs": "now part of engine.fast (auto, on or off)",
    "engine.head_chunk": "gone; 256 MiB of logits are held at once, run.texts_per_pass decides memory",
    "engine.head_bytes": "gone; 256 MiB of logits are held at once, run.texts_per_pass decides memory",
    "engine.max_nodes": f"{_FIXED} (twice the text's tokens)",
    "reward.epsilon": f"{_FIXED} (1e-8)",
    "pilot.epsilon": f"{_FIXED} (1e-6)",
    "ppo.epsilon": f"{_FIXED} (1e-6)",
    "grpo.epsilon": f"{_FIXED} (1e-6)",
    "ppo.warmup_rounds": "now critic.warmup_rounds",
    "qualify.rounds": "now critic.warmup_rounds",
    "qualify.delta": "gone; no run read it",
    "calibration.weight_width": "now calibration.width, of both heads",
    "calibration.mean_width": "now calibration.width, of both heads",
    "calibration.layers": f"{_FIXED} (2)",
    "calibration.mean_lr": f"{_FIXED} (1e-3); calibration.mean_steps lets the mean head follow more closely",
    "calibration.multiplier_lr": f"{_FIXED} (0.5)",
    "calibration.multiplier_start": f"{_FIXED} (1)",
    "calibration.multiplier_damping": f"{_FIXED} (5)",
    "calibration.weight_decay": f"{_FIXED} (0.01); calibration.dropout restrains the heads",
    "calibration.stop_share": f"{_FIXED} (0.25)",
    "calibration.patience": f"{_FIXED} (8)",
    "calibration.folds": f"{_FIXED} (2)",
    "heads.mean_bound": "now calibration.mean_bound",
    "heads.action_width": f"{_FIXED} (16)",
    "qualify.mode": "now qualify.rule (strict, sustained or fixed); fixed is what mode = fixed was",
    "optimizer.betas": f"{_FIXED} (0.9, 0.95)",
    "optimizer.eps": f"{_FIXED} (1e-8)",
    "optimizer.final_fraction": "gone; linear and cosine schedules end at 0",
    "critic.lora_alpha": f"{_FIXED} (32)",
    "critic.warmup_loss": "gone; the loss of a warm-up is squared, critic.loss is that of later windows",
    "critic.weight_decay": f"{_FIXED} (0)",
    "gate.enabled": "gone; gate.passes = 0 is a run without a gate",
    "gate.width": f"{_FIXED} (64)",
    "gate.weight_decay": f"{_FIXED} (0.01)",
    "gate.batch": f"{_FIXED} (64)",
    "gate.utility_scale": "gone; divide gate.utility by the former scale",
    "window.scale": "gone; the role scale gets as many trajectories as window.pilot says",
    "window.head_validate": "gone; the role head_validate gets half of window.head_train",
    "run.develop_after": "gone; results come from the test split (text.sequences.test), which no search looks at",
    "run.out": "gone; name the folder by --out, or by train(…, out=…)",
}
"""Dotted key → one line: what to write instead, or why nothing."""

FORMER_PRESETS: dict[str, str] = {
    "smollm2-135m": "is now smollm2-135m-toy: SmolLM2-135M-Instruct on the small text that comes with tfive",
    "smollm2-135m-instruct": "is now smollm2-135m-study: SmolLM2-135M-Instruct on the real text of its study",
}
"""Name → one line: what it is called now, and what it is."""
