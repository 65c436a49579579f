"""What the run itself needs to know: its seed, how often it saves and measures, where it logs, how it begins."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tfive.section import Section

Tracker = Literal["tensorboard", "wandb", "trackio"]


class RunSettings(Section):
    """Seed, checkpoints, measurements and trackers of one run."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Every random number of the run is a function of this seed and of what is drawn."""

    seconds: float | None = Field(None, gt=0, le=1e9)
    """Most seconds of windows, without measuring and without what comes before the first (a warm start, a pilot of
    positions; reports count these): the window in which they have passed is the last, and the run ends as it does after
    `window.windows`. Of several processes the first one's clock decides. None: `window.windows` alone says when it
    ends."""

    deterministic: bool = False
    """Deterministic kernels on GPUs, too: one seed then gives the same numbers again, and a run that was killed and
    resumed those of an undisturbed one. It is slower; a kernel that cannot is named in one line. CPUs always do."""

    texts_per_pass: int = Field(8, ge=1, le=65_536)
    """Texts in one forward or backward pass; it decides speed and memory, never what is computed."""

    texts_per_rollout: int | None = Field(None, ge=1, le=65_536)
    """The same for passes without gradients (sampling, scoring, reading features), which need less memory; none means
    `texts_per_pass`."""

    threads: int | None = Field(None, ge=1, le=65_536)
    """Threads for work on processors; none means a core each. Small models gain little by more than one: threads wait
    for one another most of the time, and waiting takes a processor's time, too."""

    checkpoint_every: int = Field(1, ge=0, le=1_000_000)
    """Windows between two checkpoints; the last window is always saved, with 0 it alone."""

    checkpoint_phases: bool = False
    """Also save whenever a phase of a window ends: less to do again after a crash, more writing."""

    keep: int = Field(2, ge=1, le=1_000_000)
    """Checkpoints kept on disk; older ones are removed once a newer one is complete."""

    develop_every: int = Field(1, ge=1, le=1_000_000)
    """Windows between two measurements on the development split (gains and their controls)."""

    develop_items: int = Field(256, ge=1, le=10_000_000)
    """Development items measured each time, always the same ones. When training is over, all test texts are measured
    once (`text.sequences.test`); they choose nothing, and the results of a run are theirs."""

    explorer_items: int = Field(256, ge=0, le=10_000_000)
    """Development items whose thoughts are kept token by token for the page of the run, at the start, half-way and at
    the end; 0 keeps none. Half-way is by `window.windows`: a run that `run.seconds` ends before keeps none there."""

    trackers: tuple[Tracker, ...] = ()
    """Trackers asked for beside the JSON lines; TensorBoard is also used whenever it is installed."""

    project: str = Field("tfive", min_length=1)
    """Project name shown in W&B or trackio."""

    @property
    def rollout_texts(self) -> int:
        """Texts in one pass without gradients."""
        return self.texts_per_rollout or self.texts_per_pass


class BenchmarkSettings(Section):
    """Benchmarks measured while a run trains, for every method alike; nothing of the run depends on them."""

    every: int = Field(0, ge=0, le=1_000_000_000)
    """Optimizer steps between two measurements: before the first window, at the end of each that reaches a multiple,
    and after the last; 0 measures none."""

    gains: tuple[str, ...] = ()
    """Tasks whose right answers are predicted with and without a thought: thought gain and mixed gain."""

    scores: tuple[str, ...] = ()
    """Tasks that are answered and judged: options by log-likelihood, others by one greedy answer."""

    items: int = Field(256, ge=1, le=1_000_000)
    """Most items of each task, the first ones."""

    data: str | None = None
    """Folder of the tasks' files; none means that they come from the hub."""

    thoughts: str = "none"
    """Where answers are written with hidden thoughts, as `tfive eval --thoughts` takes it (`none`, `answer`, …)."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> BenchmarkSettings:
        if bool(self.every) != bool(self.gains or self.scores):
            raise ValueError("every and the tasks of gains or scores belong together: give both or neither")
        return self


class WarmstartSettings(Section):
    """Thoughts learned by likelihood before the first window, whatever the method."""

    source: Literal["off", "hindsight", "given"] = "off"
    """Where they come from: drawn by the model itself, those that in hindsight help most, and more than the best of
    other texts; or workings in the rows of `path`, at the matches of `text.positions.pattern`."""

    path: str | None = None
    """File of rows with `text` and `workings` (one for each match, as it stands between the delimiters)."""

    rounds: int = Field(2, ge=1, le=1000)
    """How often thoughts are drawn anew and learned; given ones are learned in one round."""

    items: int = Field(512, ge=2, le=10_000_000)
    """Positions at which thoughts are drawn in a round."""

    samples: int = Field(8, ge=1, le=4096)
    """Thoughts drawn at each position, of which the best may be learned."""

    steps: int = Field(60, ge=1, le=1_000_000)
    """Updates of a round, each on about 32 thoughts."""

    lr: float = Field(1e-5, ge=1e-12, le=1)
    """Peak learning rate of these updates; it rises over a tenth of them and then falls to 0."""

    reading: int = Field(0, ge=0, le=1_000_000)
    """Further updates that teach careful reading: the model draws thoughts of its own at the positions of the last
    round and learns what follows them, while it goes on learning to write the thoughts of that round. Without them it
    has read nothing but thoughts that help, and trusts whatever a thought says. Where `thought.checkpoints` has steps
    on the way, half of the thoughts that go on behind one are read cut there, as rewards will read them."""

    @model_validator(mode="after")
    def _is_whole(self) -> WarmstartSettings:
        if (self.source == "given") != (self.path is not None):
            raise ValueError("path names the file of given workings: set source to given and path, or neither")
        if self.reading and self.source == "off":
            raise ValueError("reading comes after a warm start's rounds: set source as well, or reading to 0")
        return self
