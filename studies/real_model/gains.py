"""Thought gains of a model as it is, with every control, and the tree engine against plain rows on its weights.

    python studies/real_model/gains.py --model MODEL.gguf --corpus web.jsonl.gz=85 math.jsonl.gz=15 --out gains.json

Texts are the first `--tokens` tokens of documents that are at least as long, drawn at random from each file in
proportion to its share, one text per document. The tree is compared with the stock model in float32, one row per
thought, without a tree, a cache or padding.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive.cli.evaluate_gains import parse_corpus
from tfive.cli.options import script
from tfive.errors import UserError
from tfive.evaluate.diagnostics import Corpus, SampleSize, draw_texts
from tfive.inference.thought_model import plan_for
from tfive.models.load import Loaded, load_model
from tfive.rl.clusters import Estimate, clustered_mean
from tfive.rl.gains import Gains, measure
from tfive.rl.sampling import micro_batches
from tfive.rl.trajectory import last_loss
from tfive.text.items import PositionChooser
from tfive.text.settings import Positions, Where
from tfive.text.tokens import TextTokenizer
from tfive.tree.admission import admit
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.settings import SamplingSettings, ThoughtSettings
from tfive_lab.study_files import file_sha256, software_versions, without_folders, write_json

DELIMITERS: dict[str, dict[str, str]] = {
    "parenthesis": {"open": " (", "close": ")"},
    "none": {"delimiters": "none"},
    "dashes": {"open": "---", "close": "---"},
    "blank-line": {"open": "\n\n", "close": "\n\n"},
}


@dataclass(frozen=True)
class Sampled:
    """The texts of a measurement, the file each comes from, and digests that identify them."""

    texts: TextBatch
    source_B: list[str]
    files: list[dict[str, Any]]
    sha256: str


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a .gguf file, a model folder, a hub id or nano")
    parser.add_argument("--corpus", required=True, nargs="+", help="FILE or FILE=SHARE; .jsonl, .jsonl.gz, .txt, …")
    parser.add_argument("--only", help="FIELD=START: only rows whose field starts so")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a text")
    parser.add_argument("--positions", type=int, default=8, help="most positions of a text")
    parser.add_argument("--length", type=int, default=12, help="tokens of a thought")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--horizon", type=int, default=16)
    parser.add_argument("--delimiters", nargs="+", choices=DELIMITERS, default=["parenthesis"])
    parser.add_argument("--plain-texts", type=int, default=3, help="texts of the tree-against-plain part (0: none)")
    parser.add_argument(
        "--same-text", action="store_true", help="also score a thought of the same text's next position"
    )
    parser.add_argument("--rows", type=int, default=2, help="texts in one pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the JSON file; without it only the table is shown")
    return parser.parse_args(given)


def sources_of(asked: argparse.Namespace) -> list[Corpus]:
    """The corpus files with their shares."""
    where = None
    if asked.only is not None:
        field, sign, start = asked.only.partition("=")
        if not (field and sign and start):
            raise UserError(f"--only {asked.only!r}: write FIELD=START")
        where = Where(field=field, at_least=start, below=start + "\U0010ffff")
    # One entry a file: every file's digest is part of the record.
    return [
        Corpus(file.name, [file], source.share) for source in parse_corpus(asked.corpus, where) for file in source.files
    ]


def sample_texts(asked: argparse.Namespace, loaded: Loaded) -> Sampled:
    """Texts of all files in a random order with uniform positions, one document each."""
    tokenizer = TextTokenizer.of(loaded.tokenizer)
    sources = sources_of(asked)
    size = SampleSize(texts=asked.texts, tokens=asked.tokens, seed=asked.seed)
    tokens_BS, number_B, short = draw_texts(sources, tokenizer, size)
    files: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        facts: dict[str, Any] = {"name": source.name, "sha256": source.files[0].digest(), "share": source.share}
        facts["texts"] = number_B.count(number)
        files.append(facts | ({"shorter_documents_passed_over": short[number]} if facts["texts"] else {}))
    chooser = PositionChooser(Positions(per_text=asked.positions), asked.horizon, asked.seed, tokenizer)
    positions_BP = np.full((asked.texts, asked.positions), -1, dtype=np.int64)
    for row, tokens_S in enumerate(tokens_BS):
        chosen = [p for p, _ in chooser.row(row, tokens_S, np.zeros_like(tokens_S), None)]
        positions_BP[row, : len(chosen)] = chosen
    items_BP = np.where(positions_BP >= 0, np.arange(positions_BP.size).reshape(positions_BP.shape), -1)
    digest = hashlib.sha256(tokens_BS.astype("<i8").tobytes() + positions_BP.astype("<i8").tobytes()).hexdigest()
    tokens, positions, items = (torch.from_numpy(array) for array in (tokens_BS, positions_BP, items_BP))
    texts = TextBatch(tokens, torch.zeros_like(tokens), positions, items)
    return Sampled(texts, [sources[number].name for number in number_B], files, digest)


def plan_of(asked: argparse.Namespace, name: str, loaded: Loaded) -> ThoughtPlan:
    """The thought plan that a training run with these delimiters would have."""
    settings: dict[str, Any] = {"length": asked.length, "checkpoints": asked.checkpoints, "horizon": asked.horizon}
    thought = ThoughtSettings.model_validate(settings | DELIMITERS[name])
    return plan_for(thought, loaded.model, loaded.tokenizer)


def gains_report(gains: Gains, select_I: Tensor | None = None) -> dict[str, Any]:
    """Means with text-clustered errors and intervals, of `select_I` alone if given.

    Gains against the base model are left out: the model is its own base.
    """
    chosen_I = torch.ones_like(gains.text_I, dtype=torch.bool) if select_I is None else select_I
    found: dict[str, Any] = {}
    for name, estimate in gains.estimates(chosen_I).items():
        if name not in ("gain_vs_base", "no_thought_drift"):
            found[name] = estimate_report(estimate)
    gain_I = gains.per_item()["thought_gain"][chosen_I].double()
    found["thought_gain_sd_over_positions"] = float(gain_I.std()) if len(gain_I) > 1 else None
    found["useful_fraction"] = float((gain_I > 0).double().mean())
    found["items"], found["texts"] = len(gain_I), int(gains.text_I[chosen_I].unique().numel())
    return found


def shifted(thoughts: Thoughts) -> Thoughts:
    """Every branch with the thought of the next position of its own text (the last with the first's)."""
    tokens_BRT = thoughts.tokens_BRT.clone()
    for row, valid_R in enumerate(thoughts.valid_BR):
        branch = valid_R.nonzero()[:, 0]
        if len(branch) < 2:
            raise UserError(f"--same-text: text {row} has {len(branch)} positions, two are needed; make texts longer")
        tokens_BRT[row, branch] = thoughts.tokens_BRT[row, branch.roll(-1)]
    return replace(thoughts, tokens_BRT=tokens_BRT)


@torch.no_grad()
def same_text_report(engine: TreeModel, texts: TextBatch, own: Thoughts, gains: Gains, rows: int) -> dict[str, Any]:
    """Gain with the thought of another position of the same text, and how much better a position's own thought is."""
    lent, parts = shifted(own), []
    for part in micro_batches(len(texts.tokens_BS), rows):
        scores = engine.score(texts.rows(part.start, part.stop), lent.rows(part.start, part.stop))
        parts.append(last_loss(scores.losses_BRK, scores.mask_BRK))
    loss_I = torch.cat(parts)[own.valid_BR].float().cpu()
    differences = {
        "same_text_gain": gains.no_thought_I - loss_I,
        "content_gain_against_same_text": loss_I - gains.own_I,
        "other_text_minus_same_text_loss": gains.other_I - loss_I,
    }
    return {name: estimate_report(clustered_mean(value_I, gains.text_I)) for name, value_I in differences.items()}


def estimate_report(estimate: Estimate) -> dict[str, Any]:
    """A mean with its text-clustered error and interval."""
    return {"mean": estimate.mean, "error": estimate.error, "interval_95": list(estimate.interval())}


def measured(engine: TreeModel, sampled: Sampled, asked: argparse.Namespace) -> tuple[dict[str, Any], Thoughts]:
    """The gains with one pair of delimiters, overall and file by file, and the thoughts."""
    texts = sampled.texts.to(engine.device)
    names = sorted(set(sampled.source_B))
    number_B1 = torch.tensor([names.index(name) for name in sampled.source_B])[:, None]
    unknown_BR = torch.full_like(texts.positions_BP, float("nan"), dtype=torch.float32)
    gains, thoughts = measure(
        engine,
        texts,
        SamplingSettings(),
        base_no_thought_BR=unknown_BR,
        kind_BP=number_B1.expand_as(texts.positions_BP),
        seed=asked.seed,
        rows=asked.rows,
    )
    found = gains_report(gains)
    if asked.same_text:
        found |= same_text_report(engine, texts, thoughts, gains, asked.rows)
    if len(names) > 1:
        found["by_file"] = {name: gains_report(gains, gains.kind_I == i) for i, name in enumerate(names)}
    return found, thoughts


def plain_rows(model: Any, plan: ThoughtPlan, texts: TextBatch, thoughts: Thoughts) -> dict[str, list[Tensor]]:
    """Log-probabilities and losses from the stock model, one row of token ids per thought and no cache."""

    def log_prob(row: list[int], count: int, forbidden: list[int]) -> Tensor:
        """Log-probability of the last `count` ids of a row."""
        logits = model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0]
        # At 49,152 entries PyTorch's float32 log-softmax on the CPU has a bias of about 1e-5.
        logits = logits[-count - 1 : -1].double()
        logits[:, forbidden] = float("-inf")
        return logits.log_softmax(-1)[torch.arange(count), torch.tensor(row[-count:])].cpu()

    found: dict[str, list[Tensor]] = {"thought_log_prob": [], "checkpoint_loss": [], "no_thought_loss": []}
    for b, r in thoughts.valid_BR.nonzero().tolist():
        text, p = texts.tokens_BS[b].tolist(), int(texts.positions_BP[b, r // plan.group])
        before, after = text[: p + 1], text[p + 1 : p + 1 + plan.horizon]
        opened = [*before, *plan.open_ids]
        z = thoughts.tokens_BRT[b, r].tolist()
        found["thought_log_prob"].append(log_prob(opened + z, plan.length, list(plan.forbidden_ids)))
        rows = [[*opened, *z[:tau], *plan.close_ids, *after] for tau in plan.checkpoints]
        losses = [-log_prob(row, len(after), []).mean() for row in rows]
        found["checkpoint_loss"].append(torch.stack(losses))
        found["no_thought_loss"].append(-log_prob([*before, *after], len(after), []).mean())
    return found


@torch.no_grad()
def against_plain(engine: TreeModel, stock: Any, texts: TextBatch, thoughts: Thoughts) -> dict[str, Any]:
    """Largest and mean absolute differences between the tree and plain rows."""
    valid = thoughts.valid_BR
    scores, recomputed = engine.score(texts, thoughts), engine.policy(texts, thoughts).need("log_prob_BRT")
    plain = plain_rows(stock, engine.plan, texts, thoughts)
    ours = {
        "thought_log_prob": recomputed[valid],
        "sampled_thought_log_prob": thoughts.log_q_BRT[valid],
        "checkpoint_loss": scores.losses_BRK[valid],
        "no_thought_loss": scores.no_thought_BR[valid],
    }
    found: dict[str, Any] = {"texts": len(texts.tokens_BS), "thoughts": int(valid.sum())}
    between = (ours["thought_log_prob"] - ours["sampled_thought_log_prob"]).abs()
    found["sampled_and_recomputed"] = {"max_abs": float(between.max()), "mean_abs": float(between.mean())}
    for name, values in ours.items():
        theirs = torch.stack(plain[name.removeprefix("sampled_")])
        apart = (values.double().cpu() - theirs).abs()
        found[name] = {
            "max_abs": float(apart.max()),
            "mean_abs": float(apart.mean()),
            "plain_mean": float(theirs.mean()),
            "count": apart.numel(),
        }
    return found


def command_of(asked: argparse.Namespace) -> str:
    """The command with all its defaults, absolute paths reduced to their last part."""
    words = ["python", "studies/real_model/gains.py"]
    for name, value in vars(asked).items():
        values = value if isinstance(value, list) else [value]
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *without_folders([str(one) for one in values])]
    return " ".join(words)


def origin(asked: argparse.Namespace, loaded: Loaded) -> dict[str, Any]:
    """Which model, which software, which command."""
    return {
        "model": loaded.name,
        "model_sha256": file_sha256(Path(asked.model)),
        "compute": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(next(loaded.model.parameters()).device),
        "threads": torch.get_num_threads(),
        "seed": asked.seed,
        "command": command_of(asked),
        "versions": software_versions(),
    }


def report_of(asked: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that was asked for."""
    began = time.perf_counter()
    loaded = load_model(asked.model, dtype=torch.float32, device=asked.device)
    sampled = sample_texts(asked, loaded)
    report = origin(asked, loaded)
    report["text"] = {"tokens": asked.tokens, "only": asked.only, "files": sampled.files, "sha256": sampled.sha256}
    report["thought"] = {name: getattr(asked, name) for name in ("length", "checkpoints", "horizon", "positions")}
    report["sampling"] = SamplingSettings().model_dump()
    # A copy for the plain rows, made before the engine has touched the model.
    stock = copy.deepcopy(loaded.model)
    report["gains"] = {}
    for name in asked.delimiters:
        engine = TreeModel(loaded.model, plan_of(asked, name, loaded))
        report["gains"][name], thoughts = measured(engine, sampled, asked)
        report["gains"][name]["delimiters"] = DELIMITERS[name]
        say(line_of(name, report["gains"][name]))
        if name == asked.delimiters[0] and asked.plain_texts:
            report["admission"] = asdict(admit(engine, asked.tokens + engine.plan.reach))
            few = min(asked.plain_texts, asked.texts)
            some = sampled.texts.rows(0, few).to(engine.device)
            report["tree_against_plain"] = against_plain(engine, stock, some, thoughts.rows(0, few))
            say(json.dumps(report["tree_against_plain"]))
    report["seconds"] = round(time.perf_counter() - began, 1)
    return report


def line_of(name: str, found: dict[str, Any]) -> str:
    """One line of the table."""
    shown = ["thought_gain", "other_gain", "content_gain", "empty_gain", "random_gain"]
    shown += [key for key in ("same_text_gain", "content_gain_against_same_text") if key in found]
    parts = [f"{key} {found[key]['mean']:+.3f} ± {found[key]['error']:.3f}" for key in shown]
    return f"{name}: {', '.join(parts)}, useful {found['useful_fraction']:.1%} of {found['items']}"


def main(given: list[str] | None = None) -> int:
    """Measure, print, write."""
    asked = arguments(given)
    if asked.out is not None and not asked.out.parent.is_dir():
        raise UserError(f"--out {asked.out}: there is no folder {asked.out.parent}; make it first")
    report = report_of(asked, print)
    if asked.out is not None:
        write_json(asked.out, report)
    return 0


if __name__ == "__main__":
    script(main)
