"""When a metric of verl is broken, by its value and by what is usual for it."""

from collections.abc import Callable
from typing import NamedTuple

from verl_gdpo.run.levels import Level


class Limit(NamedTuple):
    """When a metric of verl is broken, by its value and its level."""

    topic: str
    is_broken: Callable[[float, Level], bool]
    what: str
    advice: str


LOWER = "Lower the learning rate, and go on from a checkpoint before these steps"
ADVANTAGES = "critic/advantages"  # the larger of /min and /max
LIMITS = {
    "actor/grad_norm": Limit(
        "gradient",
        lambda value, of: value > 1000 or value > max(50 * of.start, 10),
        "the gradient norm {is} {value:,.3g}; at the start it was {start:.2g}",
        LOWER,
    ),
    "actor/entropy": Limit(
        "entropy",
        lambda value, of: value < min(0.02 * of.start, 1e-3),
        "the entropy {is} {value:.2g}: all samples of a prompt {are} nearly the same; at the start "
        "it was {start:.2g}",
        LOWER + ", or set actor.entropy_coeff",
    ),
    "actor/ppo_kl": Limit(
        "update",
        lambda value, of: value > 0.1 and value > 10 * of.usual,
        "one update changes the policy by a KL of {value:.2g}; before, it was {usual:.2g}",
        LOWER,
    ),
    "actor/kl_loss": Limit(
        "reference",
        lambda value, of: value > 0.1 and value > 10 * of.usual,
        "the KL to the reference policy {is} {value:.2g}, after {usual:.2g}",
        LOWER + ", or raise actor.kl_loss_coef",
    ),
    "actor/pg_clipfrac": Limit(
        "clipped",
        lambda value, of: value > max(5 * of.start, 0.5),
        "{value:.0%} of the tokens {are} clipped, and train nothing; at the start {start:.0%} were",
        LOWER,
    ),
    ADVANTAGES: Limit(
        "advantages",
        lambda value, of: value > 20 * of.start,
        "|A| {is} up to {value:,.3g}; at the start it was up to {start:.2g}",
        "Set algorithm.filter_groups.enable=True, or ++algorithm.gdpo.batch_norm=none with a "
        "lower learning rate, and look at the rewards for outliers",
    ),
    "response_length/clip_ratio": Limit(
        "length limit",
        lambda value, of: value > 0.5 and of.start < 0.25,
        "{value:.0%} of the responses {are} as long as the longest, so they {are} cut off or "
        "all alike; at the start {start:.0%} were",
        "Read some of them; raise data.max_response_length, or reward shorter answers",
    ),
    "response/aborted_ratio": Limit(
        "aborted",
        lambda value, _: value > 0.2,
        "{value:.0%} of the responses {are} empty: their rollouts were aborted",
        "Look in train.log for what the rollout servers said",
    ),
}
