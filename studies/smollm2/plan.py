"""What the study consists of: methods, search trials, the cells of every study and what a study sets of the preset.

A cell is one run: a method, perhaps with presets or settings added behind a `+`, and a seed.
"""

from __future__ import annotations

import json

from tfive_lab.study_files import METHODS

PRESET = "smollm2-135m-study"
RATES = ("5e-5", "1e-4", "2e-4")
TRIALS = {method: tuple(f"optimizer.lr={rate}" for rate in RATES) for method in METHODS[1:6]} | {
    "t5": (
        "optimizer.lr=1e-4+critic.pair=same",
        "optimizer.lr=2e-4+critic.pair=same",
        "optimizer.lr=2e-4+critic.pair=bracket",
    )
}
"""Three trials for every trained method. T⁵ also has its pair of critics to choose, so it tries one rate fewer."""
SEARCH_SEED = 100
"""The seed of every trial; no other study uses it."""
ABLATIONS = (
    "fixed-average", "minimum", "no-qualification", "single-critic", "pair-same", "pair-disjoint", "pair-bracket",
)  # fmt: skip
"""Presets `ablation-…` of T⁵."""
CHANGES = (
    "t5+reward.reference=foreign",
    "t5+ablation-no-qualification+reward.reference=foreign",
    "quiet-star-ppo+reward.reference=foreign",
    "t5+window.reading=3",
    "t5+reward.reference=foreign+window.reading=3",
    "t5+anchor.mixture=0.5",
)
"""Changes of a method that the results of the first seed suggested; each is compared with the method in `main`."""
OPENINGS = (
    "(", "(that is,", "(in other words,", "(keywords:", "(next:", "(this is about",
    "(note: the following text will say", "—",
)  # fmt: skip
"""Texts that open a thought; the first is the reference. A bracket is closed by a bracket, a dash by a dash."""
STUDIES = ("search", "main", "clock", "ablations", "changes", "openings")
SETTINGS = {
    "search": ("window.windows=3", "run.develop_every=3"),
    "clock": ("window.windows=3", "run.develop_every=3", "run.develop_items=64"),
    "main": ("run.checkpoint_every=5",),
    "ablations": ("run.develop_every=5",),
    "changes": ("run.develop_every=5",),
    "openings": ("window.windows=1", "run.develop_every=1"),
}
"""What a study sets beside the preset. The search is judged by development texts, the other studies by test texts; the
checkpoint half-way through a run of `main` is evaluated on the benchmarks as well."""
SCORED = ("piqa", "arc_challenge", "csqa")
"""Benchmarks whose options are compared by log-likelihood; all their items are used."""
WRITTEN = ("gsm8k_greedy", "math500_greedy")
"""Benchmarks with generated answers, evaluated at the end of a run with `--written`."""
LONGEST = 400
"""Most tokens of a generated answer."""
CONTROL = "anchor-only"
"""The method without a policy gradient, which every method with thoughts is compared with."""
RESULT = "cell.json"
"""The file in a cell's folder that says it is finished, or why it failed."""


def folder_name(label: str, seed: int) -> str:
    """The name of a cell's folder inside its study's."""
    return f"{label.replace('/', '_')}-seed{seed}"


def cells(study: str, seeds: int) -> list[tuple[str, int]]:
    """The cells of a study as (label, seed). Seeds vary slowest, so a study cut short has every method."""
    if study == "search":
        return [(f"{method}+{trial}", SEARCH_SEED) for method, trials in TRIALS.items() for trial in trials]
    if study == "clock":
        return [(method, 0) for method in METHODS if method != "base"]
    if study == "openings":
        return [(opening_label(words), 0) for words in OPENINGS]
    labels = {
        "main": METHODS,
        "ablations": tuple(f"t5+ablation-{name}" for name in ABLATIONS),
        "changes": CHANGES,
    }[study]
    return [(label, seed) for seed in range(seeds) for label in labels]


def opening_label(words: str) -> str:
    """The label of the untrained model with these words before its thoughts."""
    close = ")" if words.startswith("(") else words
    # Quoted, so that no value is trimmed or read as anything but text.
    quoted = (json.dumps(one, ensure_ascii=False) for one in (words, close))
    return "base+thought.open={}+thought.close={}".format(*quoted)
