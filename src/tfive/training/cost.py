"""What a step costs by counting: nodes read by whole forward passes, per actor item, by a method's declaration.

A node is one token of a tree row; a backward pass counts as two forward passes; a share of the blocks counts as that
share. Launches, attention's growth with the row, the vocabulary head, optimizers and the small heads are left out, so
this says where the work lies and not how long it takes.
"""

from __future__ import annotations

from tfive.config.config import Config
from tfive.methods.spec import CRITIC_ROLES
from tfive.rl.settings import OLD_LAW
from tfive.training.drawn import activations_come_along


def nodes_per_item(config: Config, layers: int) -> dict[str, float]:
    """Forward-equivalent nodes per actor item, by what they are for; `sum` of the values is the step."""
    thought, positions = config.thought, config.text.positions.per_text
    delimiter = 0 if thought.delimiters == "none" else 1
    trunk, branch = config.text.sequence_length / positions, config.group * (delimiter + thought.length)
    row, spec = trunk + branch, config.spec
    # Gated reading reads the text's last token once more.
    continuation = delimiter + thought.horizon - 1.0 + (thought.reading == "gated")
    # Anchors are read off the policy's rows; continuations hang behind one thought a position, whatever the group.
    after = continuation if config.anchor.conditioned and spec.thinks else 0.0
    read = row if spec.rewarded or after else trunk
    passes = config.actor.reuse_passes if spec.trains else 0
    found = {"update": 3.0 * passes * read, "anchor": 3.0 * passes * after}
    # Probes only report: they are no part of a step.
    drawing = [role for role in spec.roles_of(config) if role != "probe"]
    share = {role: config.window.count(role) / config.window.items for role in drawing}
    drawn = sum(share.values()) if spec.thinks else 0.0
    # Scoring reads the thoughts once more: the sampler's keys and states are rounded otherwise.
    after_thoughts = 1.0 if spec.scoring == "next_token" else len(thought.checkpoints) * continuation
    by_itself = [role for role in spec.recorded if role not in OLD_LAW]
    if config.sampling.parity:
        by_itself = list(spec.recorded)
    elif config.ratio.denominator == "scored":
        by_itself = []
    found |= {
        "sample": drawn * row,
        "score": drawn * (branch + config.group * after_thoughts),
        "old law": sum(share.get(role, 0.0) for role in by_itself) * row,
    }
    if spec.averages:
        found["teacher"] = len(spec.averages) * trunk
    if spec.critics:
        seen = sum(share.get(role, 0.0) for role in CRITIC_ROLES)
        adapted = _adapted(config, layers)
        # The policy's activations are left behind by sampling and scoring; final states for heads alone are not.
        below = _probed(config, layers) if config.critic.adapt == "probe" else 1 - adapted
        found["lower features"] = 0.0 if activations_come_along(config) else seen * row * below
        # A fitting set of its own is judged before the fit only where the loss is clipped around that.
        clips = config.critic.loss == "clipped" and config.critic.pair != "bracket"
        judged = seen if clips else seen - share.get("critic_fit", 0.0)
        if config.window.crossed:  # to test them, and to mix what they say
            judged += share["actor"]
        found["critics"] = spec.critics * judged * row * adapted + fitting_nodes(config, layers)
    return found


def _adapted(config: Config, layers: int) -> float:
    """The share of the blocks that critics have of their own."""
    blocks = min(config.critic.blocks, layers)
    return {"head": 0.0, "probe": 0.0, "full": 1.0}.get(config.critic.adapt, blocks / layers)


def _probed(config: Config, layers: int) -> float:
    """The share of the blocks below a probe, which stands above the first at least (`rl.critic.first_block`)."""
    return max(layers - config.critic.blocks, 1) / layers


def fitting_nodes(config: Config, layers: int) -> float:
    """Forward-equivalent nodes per actor item that fitting all critics takes; evaluating them is not in it."""
    delimiter = 0 if config.thought.delimiters == "none" else 1
    row = config.text.sequence_length / config.text.positions.per_text
    row += config.group * (delimiter + config.thought.length)
    fitted = config.window.count(config.window.fitted_role) / config.window.items
    return config.spec.critics * 3.0 * config.critic.passes * fitted * row * _adapted(config, layers)
