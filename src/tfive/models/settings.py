"""Which base model, and where and how precisely it computes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tfive.section import Section


class ModelSettings(Section):
    """The base model that is mid-trained."""

    name: str = Field("nano", min_length=1)
    """`nano` (embedded), a hub id, a local folder, a `.gguf` file, or a wheel that contains one."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; none means its default branch."""

    device: str = "auto"
    """`auto` (CUDA where there is one, else the CPU), `cpu`, `cuda` or `cuda:N`."""

    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the compute copy; `auto` is bfloat16 on a GPU that has it and float32 on the CPU. Trained weights,
    moments and teachers are float32 in every case (see `bf16_update` for the one exception)."""
