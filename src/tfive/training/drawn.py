"""Which sets of a window are drawn in the same passes, counted in texts."""

from __future__ import annotations

from tfive.config.config import Config
from tfive.config.rules import texts_needed
from tfive.methods.spec import CRITIC_ROLES


def texts_drawn_together(config: Config) -> list[int]:
    """Texts of every draw of a window: of T⁵ the fitting set goes with the test that follows, and the pilot's with all
    that come after it, or with the test where critics are fitted before; further tests, the run's first reward scale
    and probes are drawn by themselves."""
    spec = config.spec
    texts = {role: texts_needed(config, role) for role in (*spec.roles_of(config), *spec.first_roles_of(config))}
    if "qualify" not in texts:
        return list(texts.values())
    alone = [texts[role] for role in ("qualify", "scale", "probe") if role in texts]
    return [texts["critic_fit"] + texts["qualify"], _after_fitting(config, texts), *alone]


def activations_come_along(config: Config) -> bool:
    """Whether sampling and scoring leave what enters the critics' first block behind: for critics on the policy that
    do not begin at its end, unless scoring reads thoughts otherwise (`rl.sampling`: parity mode, gated reading)."""
    if config.critic.features == "base" or config.critic.adapt not in ("probe", "top", "lora"):
        return False
    return not config.sampling.parity and config.thought.reading != "gated"


def featured_texts(config: Config) -> int:
    """Texts whose activations below the critics are there at once: those of the fitting set; where they come with the
    sets, of those drawn together."""
    drawn = (*config.spec.roles_of(config), *config.spec.first_roles_of(config))
    texts = {role: texts_needed(config, role) for role in CRITIC_ROLES if role in drawn}
    if not activations_come_along(config):
        return max(texts["critic_fit"], texts[config.window.fitted_role])
    return max(texts["critic_fit"] + texts.get("qualify", 0), _after_fitting(config, texts))


def _after_fitting(config: Config, texts: dict[str, int]) -> int:
    """Texts of the sets of a later window that are drawn in the same passes."""
    with_the_test = ("qualify",) if config.window.history else ("scale",)
    roles = (*with_the_test, "pilot", "head_train", "head_validate", "actor")
    return sum(texts.get(role, 0) for role in roles)
