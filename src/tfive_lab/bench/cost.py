"""What a step costs by counting: nodes read by whole forward passes, per actor item, of T⁵ and of group methods.

A node is one token of a tree row; a backward pass counts as two forward passes; a share of the blocks counts as that
share. Launches, attention's growth with the row, the vocabulary head, optimizers and the small heads are left out, so
this says where the work lies and not how long it takes.
"""

from __future__ import annotations

from tfive.config.schema import GROUPED, Config

RECORDED = ("head_train", "head_validate", "actor")
"""Roles whose old law is recorded; the heads' features of them come from the same passes."""
JUDGED = ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "actor")
"""Roles that both critics judge."""


def nodes_per_item(config: Config, layers: int) -> dict[str, float]:
    """Forward-equivalent nodes per actor item, by what they are for; `sum` of the values is the step."""
    thought, positions = config.thought, config.text.positions.per_text
    delimiter = 0 if thought.delimiters == "none" else 1
    trunk, branch = config.text.sequence_length / positions, config.group * (delimiter + thought.length)
    row, passes = trunk + branch, config.actor.reuse_passes
    # Anchors are read off the policy's rows; continuations hang behind one thought a position, whatever the group.
    after = delimiter + thought.horizon - 1.0 if config.anchor.conditioned else 0.0
    found = {"update": 3.0 * passes * row, "anchor": 3.0 * passes * after}
    if config.method == "rlp":
        return found | {"sample": row, "score": float(config.group), "old law": row, "teacher": trunk}
    scored = config.group * len(thought.checkpoints) * (delimiter + thought.horizon - 1.0)
    if config.method in GROUPED:
        return found | {"sample": row, "score": scored, "old law": row}
    share = {role: config.window.count(role) / config.window.items for role in (*JUDGED, "scale")}
    drawn = sum(share.values())
    recorded, judged = (sum(share[role] for role in roles) for roles in (RECORDED, JUDGED))
    adapted = {"head": 0.0, "full": 1.0}.get(config.critic.adapt, config.critic.blocks / layers)
    fitting = 3.0 * config.critic.passes * share["critic_fit"] + judged
    return found | {
        "sample": drawn * row,
        "score": drawn * scored,
        "old law": recorded * row,
        "lower features": judged * row * (1 - adapted),
        "critics": 2.0 * fitting * row * adapted,
    }
