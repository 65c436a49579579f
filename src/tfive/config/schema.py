"""The keys of a configuration: the sections that each room declares in its `settings.py`, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import field_validator

from tfive.config.former_keys import FORMER_KEYS
from tfive.distributed.settings import DistributedSettings
from tfive.methods.registry import methods, spec_of
from tfive.methods.spec import MethodSpec
from tfive.models.settings import ModelSettings
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.settings import (
    ActorSettings,
    AnchorSettings,
    CriticSettings,
    GaeSettings,
    GateSettings,
    OptimizerSettings,
    QualifySettings,
    RatioSettings,
    RewardSettings,
    WindowSettings,
)
from tfive.section import Section
from tfive.text.settings import TextSettings
from tfive.training.settings import BenchmarkSettings, RunSettings, WarmstartSettings
from tfive.tree.settings import EngineSettings, SamplingSettings, ThoughtSettings


class Schema(Section):
    """Every key but those of single methods, which are added to `Config` from their declarations."""

    former_keys: ClassVar[Mapping[str, str]] = FORMER_KEYS

    method: str = "t5"
    """The training method; `tfive config methods` lists them."""

    model: ModelSettings = ModelSettings()
    text: TextSettings = TextSettings()
    thought: ThoughtSettings = ThoughtSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    ratio: RatioSettings = RatioSettings()
    reward: RewardSettings = RewardSettings()
    qualify: QualifySettings = QualifySettings()
    gae: GaeSettings = GaeSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    actor: ActorSettings = ActorSettings()
    anchor: AnchorSettings = AnchorSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    critic: CriticSettings = CriticSettings()
    gate: GateSettings = GateSettings()
    window: WindowSettings = WindowSettings()
    warmstart: WarmstartSettings = WarmstartSettings()
    run: RunSettings = RunSettings()
    benchmarks: BenchmarkSettings = BenchmarkSettings()
    distributed: DistributedSettings = DistributedSettings()

    @field_validator("method")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        if name not in methods():
            raise ValueError(f"must be one of {', '.join(methods())}")
        return name

    @property
    def spec(self) -> MethodSpec:
        """What the chosen method declares."""
        return spec_of(self.method)

    @property
    def gates_start_shut(self) -> bool:
        """Whether the first window begins with gates that let no thought be read: a warm start opens them."""
        return self.thought.reading == "gated" and self.warmstart.source == "off"

    @property
    def reading_windows(self) -> int:
        """How many windows at the start only learn to read: as set, with gates that start shut at least one, since
        behind them all thoughts are worth the same and no critic could qualify. None where no thought is ever rewarded:
        there the anchors alone move the model in every window."""
        if not self.spec.rewarded:
            return 0
        return max(self.window.reading, int(self.gates_start_shut))

    @property
    def group(self) -> int:
        """G, the thoughts sampled at each position: as set, or the method's own; one where no thought is rewarded, so
        that a configuration with groups has its controls too."""
        return (self.thought.group or self.spec.group) if self.spec.rewarded else 1
