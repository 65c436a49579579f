"""Profile of the actor pass, fused parts on and off, as JSON: `python benchmarks/update_profile.py --shape qwen3-1.7b`.

Device time by family of kernels, host time and launches; every variant by the same process on the same thoughts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tfive.cli.options import script
from tfive.models.precision import choose_device, choose_dtype
from tfive_lab.bench.update import VARIANTS, render, update_profile
from tfive_lab.bench.work import SHAPES, SMALL, Work, find_model


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=["nano", *SHAPES], help="a random model of this shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each variant (median)")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds after which no further variant is begun")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which of them, separated by commas")
    for name in ("texts", "tokens", "positions", "group", "length"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--used", type=float, default=1.0, help="share of its length that a thought has on average")
    parser.add_argument("--replayed", action="store_true", help="by captured passes, as runs do")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    asked = arguments(given)
    device = choose_device(asked.device)
    model, name = find_model(asked.shape, device, choose_dtype(asked.compute, device))
    work = Work() if device.type == "cuda" else SMALL
    changes = {key: getattr(asked, key) for key in ("texts", "tokens", "positions", "group", "length")}
    work = replace(work, **{key: value for key, value in changes.items() if value is not None})
    if asked.length is not None:
        work = replace(work, checkpoints=(asked.length,))
    variants = tuple(part.strip() for part in asked.variants.split(","))
    facts = {
        "model": name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }

    def save(report: dict[str, Any]) -> None:
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            path = asked.out / f"update-profile-{asked.shape or 'embedded'}.json"
            path.write_text(json.dumps(facts | report, indent=1) + "\n", encoding="utf-8")

    options: dict[str, Any] = {
        "repeats": asked.repeats,
        "budget": asked.budget,
        "used": asked.used,
        "replayed": asked.replayed,
        "variants": variants,
    }
    report = update_profile(model, work, **options, save=save)
    save(report)
    print(render(report))
    return 0


if __name__ == "__main__":
    script(main)
