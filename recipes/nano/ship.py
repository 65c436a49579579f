"""Put a trained model, its tokenizer and the corpus sample into the package, measure it, and write its card.

    python recipes/nano/ship.py --trained WORK/model --text WORK [--per-kind 1200]
    python recipes/nano/ship.py                                   # only measure again what is in the package

The card's figures are measured here on the weights and texts as shipped (bf16 weights, computed in float32).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import asides
import measure
import torch
import train_model
from make_text import LICENCES, sha256
from phrases import MATCH_PATTERN
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL_FILES = ("model.safetensors", "config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
RUN = 12
CARD = Path(__file__).with_name("card.md")
CORPUS_FILES = ("corpus/real.jsonl.gz", "corpus/worked.jsonl.gz")
ORIGINS = {
    "wikinews": "Wikinews articles, by way of the AMALGUM corpus",
    "wikinews_interview": "Wikinews interviews, by way of the AMALGUM corpus",
    "wikivoyage": "Wikivoyage articles, by way of the AMALGUM corpus",
    "wikipedia": "Wikipedia articles, by way of LLaMA-Factory's sample file",
    "wikipedia_bio": "Wikipedia biographies, by way of the AMALGUM corpus",
    "mdpi_academic": "articles of MDPI journals, by way of the AMALGUM corpus",
    "gutenberg_fiction": "Project Gutenberg fiction (the texts themselves), by way of the AMALGUM corpus",
    "arxiv": "arXiv titles and abstracts of 2025 and 2026 (arXiv metadata)",
    "nano-worked-prose": "written by this recipe",
}


def gain_text(gain: tuple[float, float]) -> str:
    return f"{gain[0]:+.3f} ± {gain[1]:.3f}"


def gain_table(table: dict[str, dict[str, Any]]) -> str:
    columns = ("working", "sampled", "empty", "other", "random", "content")
    lines = [
        "| kind of position | places | no-thought loss | " + " | ".join(columns) + " |",
        "|---|---|---|" + "---|" * len(columns),
    ]
    for kind, row in table.items():
        cells = [gain_text(row[column]) if column in row else "–" for column in columns]
        lines.append(f"| {kind} | {row['places']} | {row['no-thought loss']:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text_table(inputs: dict[str, Any]) -> str:
    lines = ["| source | licence | pre-training documents | corpus sample passages |", "|---|---|---|---|"]
    for name, licence in LICENCES.items():
        trained, shipped = inputs["pretrain_documents"].get(name, 0), inputs["midtrain_passages"].get(name, 0)
        if name == "nano-worked-prose":
            trained, shipped = "drawn as needed", inputs["midtrain_worked"]
        lines.append(f"| {ORIGINS[name]} | {licence} | {trained} | {shipped} |")
    return "\n".join(lines)


def overlapping_passages(text: Path) -> int:
    """How many real passages of the sample share RUN words in a row with a document the model was trained on.

    No passage comes from such a document, but sources quote each other and hold a text twice.
    """

    def runs(row: dict[str, str]) -> set[tuple[str, ...]]:
        words = row["text"].split()
        return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}

    passages = [runs(row) for row in measure.read_corpus(text / "corpus", "real")]
    wanted = set().union(*passages)
    seen = set().union(*(wanted & runs(row) for row in measure.read_corpus(text, "pretrain_real")))
    return sum(not seen.isdisjoint(passage) for passage in passages)


def hash_table(files: dict[str, str]) -> str:
    return "\n".join(
        ["| file | sha256 |", "|---|---|", *(f"| `{name}` | `{digest}` |" for name, digest in files.items())]
    )


def share_text(shares: dict[str, float]) -> str:
    return ", ".join(f"{kind} {share:.3f}" for kind, share in shares.items())


def options(recipe: dict[str, Any], log: dict[str, float]) -> str:
    """What was asked of train_model.py; a run of fewer steps than asked for was ended by its clock."""
    clock = f" --seconds {log['train_s']:.0f}" if log["steps"] < recipe["steps"] else ""
    return f"--steps {recipe['steps']} --passes {recipe['passes']}{clock}"


def write_card(out: Path, card: dict[str, Any], device: str) -> None:
    """README.md from the record in card.json."""
    recipe, log, inputs, table = card["recipe"], card["log"], card["inputs"], card["measured"]
    page = CARD.read_text(encoding="utf-8").format(
        parameters=int(log["parameters"]),
        layers=recipe["shape"]["num_hidden_layers"],
        width=recipe["shape"]["hidden_size"],
        megabytes=(out / "model.safetensors").stat().st_size / 1e6,
        tokens=int(log["tokens"]),
        steps=int(log["steps"]),
        rows=recipe["rows"],
        uses=math.ceil(log["steps"] / math.ceil(recipe["steps"] / recipe["passes"])),
        seed=recipe["seed"],
        options=options(recipe, log),
        **asides.SHARES,
        longest=asides.LONGEST,
        texts=text_table(inputs),
        overlapping=card["overlapping_passages"],
        passages=sum(inputs["midtrain_passages"].values()),
        run=RUN,
        hashes=hash_table(card["files"]),
        gains=gain_table(table),
        horizon=measure.HORIZON,
        thought=measure.LONGEST,
        per_kind=card["per_kind"],
        match=measure.MATCH,
        other=1 - measure.MATCH,
        real_part=measure.REAL,
        shares=share_text(card["selected"]),
        workings=", ".join(f"{kind} {gain_text(table[kind]['working'])}" for kind in measure.RESULT_KINDS),
        average=gain_text(table[measure.SELECTED]["sampled"]),
        at_products=gain_text(table["product result"]["sampled"]),
        true_workings=table["product result"]["share of true workings"],
        empty_real=table["real text"]["empty"][0],
        held_out=train_model.HELD_OUT,
        real_loss=card["held_out_loss"]["real"],
        worked_loss=card["held_out_loss"]["worked"],
        pattern=MATCH_PATTERN,
        seconds=log["train_s"],
        device=device,
    )
    (out / "README.md").write_text(page, encoding="utf-8")


def measured(out: Path, per_kind: int) -> dict[str, Any]:
    """The card's figures and hashes, of what is in `out`."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    table = measure.measure(model, tokenizer, measure.all_places(out / "corpus", tokenizer, per_kind, seed=0), seed=0)
    measure.show(table)
    held = train_model.held_out_texts(out, tokenizer.backend_tokenizer)
    return {
        "files": {name: sha256(out / name) for name in (*MODEL_FILES, *TOKENIZER_FILES, *CORPUS_FILES)},
        "per_kind": per_kind,
        "selected": measure.selected_shares(),
        "measured": table,
        "held_out_loss": {
            name: train_model.plain_loss(model, texts, tokenizer.eos_token_id) for name, texts in held.items()
        },
    }


def ship(trained: Path, text: Path, out: Path, per_kind: int, device: str) -> None:
    """Everything the package holds of the model, in `out`."""
    (out / "corpus").mkdir(parents=True, exist_ok=True)
    for folder, some in ((trained, MODEL_FILES), (text / "tokenizer", TOKENIZER_FILES), (text, CORPUS_FILES)):
        for name in some:
            shutil.copyfile(folder / name, out / name)
    card = {
        "inputs": json.loads((text / "inputs.json").read_text()),
        "overlapping_passages": overlapping_passages(text),
        **json.loads((trained / "training.json").read_text()),
    }
    save_card(out, card | measured(out, per_kind), device)


def save_card(out: Path, card: dict[str, Any], device: str) -> None:
    (out / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_card(out, card, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trained", type=Path, help="the folder that train_model.py wrote")
    parser.add_argument("--text", type=Path, help="the folder that make_text.py wrote; goes with --trained")
    parser.add_argument("--out", type=Path, default=measure.SHIPPED)
    parser.add_argument("--per-kind", type=int, default=1200)
    parser.add_argument("--device", default="NVIDIA H200", help="what the model was trained on, for the card")
    args = parser.parse_args()
    if args.trained and args.text:
        ship(args.trained, args.text, args.out, args.per_kind, args.device)
    else:
        card = json.loads((args.out / "card.json").read_text(encoding="utf-8"))
        save_card(args.out, card | measured(args.out, args.per_kind), args.device)


if __name__ == "__main__":
    main()
