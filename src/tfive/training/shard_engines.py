"""Engines whose weights several processes hold in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tfive.config.config import Config
from tfive.distributed.roles import Role
from tfive.tree.forward import TreeModel


def in_shards(config: Config, role: Role) -> bool:
    """Whether the processes of a role hold its weights between them."""
    return len(role.ranks) > 1 and config.distributed.shard != 1


def shards_of(engine: TreeModel, beside: Mapping[str, nn.Module], role: Role, *, width: int, **options: Any) -> Any:
    """An engine's weights and those of small modules `beside` it in shards over `width` (0: all) of a role's processes,
    of which the engine's own become the whole copy; None on other processes, which help to make the groups."""
    # Imported where it is needed: a run without shards never loads FSDP.
    from tfive.distributed.shards import Shards, shard_mesh

    mesh = shard_mesh(engine.device.type, role.ranks, width)
    if role.members is None:
        return None
    waiting = role.every.waiting
    return Shards(engine.model, engine.backbone.block_names, mesh, beside=beside, waiting=waiting, **options)
