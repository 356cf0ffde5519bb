"""Policy-gradient training of tabular policies, hundreds of runs at a time.

A policy answers P prompts with L tokens out of V: token l of prompt p is drawn from
softmax(shared[l] + own[p, l]). Each step draws G answers for every prompt, computes the advantages
of one arm, and follows sum A (onehot - pi) / (P G). What a policy earns is computed from its
probabilities, and not from samples.

Shape letters: T steps, V tokens, L positions, E events, K rewards, G samples, P prompts, S seeds, Q
learning rates. The axes Q and S are runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np

from workshop.experiments.map.arms import Rewards
from workshop.experiments.map.optimizers import OPTIMIZERS
from workshop.experiments.map.settings import (
    LARGEST_FACTOR,
    POSITIONS,
    PROMPTS,
    STEPS,
    TOKENS,
    Setting,
)


@dataclass(frozen=True)
class Problem:
    """A setting and all that chance decides in it, the same for every arm and learning rate."""

    setting: Setting
    accepts_EVLSP: np.ndarray  # 1 where an event allows the token
    range_KSP: np.ndarray
    start_VLSP: np.ndarray  # logits
    draws_TLGSP: np.ndarray  # uniform numbers that choose tokens
    noise_TKGSP: np.ndarray | None  # uniform numbers in the rewards

    @cached_property
    def mask_VLSP(self) -> np.ndarray:
        """Bit e is set where event e allows the token."""
        bits = (1 << np.arange(len(self.accepts_EVLSP))).astype(np.uint8)
        return np.tensordot(bits, self.accepts_EVLSP.astype(np.uint8), 1).astype(np.uint8)

    @cached_property
    def share_KE(self) -> np.ndarray:
        """What event e adds to reward k, before its range."""
        share_KE = np.zeros((len(self.setting.rewards), len(self.setting.events)))
        done = 0
        for k, reward in enumerate(self.setting.rewards):
            count = len(reward.events)
            share_KE[k, done : done + count] = 1 / max(count, 1)
            done += count
        return share_KE.astype(self.start_VLSP.dtype)

    @cached_property
    def value_KM(self) -> np.ndarray:
        """Reward k, before its range, of an answer whose events are the bits of m."""
        events = np.arange(2 ** self.share_KE.shape[1])
        hit_EM = events >> np.arange(self.share_KE.shape[1])[:, None] & 1
        value_KM: np.ndarray = self.share_KE @ hit_EM.astype(self.start_VLSP.dtype)
        return value_KM

    @cached_property
    def is_small_KSP(self) -> np.ndarray:
        """1 for the reward of the smallest range that has a worth; the last of equal ones."""
        worth = np.array([reward.worth for reward in self.setting.rewards])[:, None, None]
        size_KSP = np.where(worth > 0, self.range_KSP, np.inf)
        last_SP = len(worth) - 1 - size_KSP[::-1].argmin(0)
        is_small_KSP: np.ndarray = np.arange(len(worth))[:, None, None] == last_SP
        return is_small_KSP.astype(self.start_VLSP.dtype)


def make_problem(
    setting: Setting, seeds: Sequence[int], dtype: type[np.floating] = np.float32
) -> Problem:
    """Draw orders, ranges and random numbers. A seed gives the same whatever its company."""
    parts = [_one_seed(setting, seed) for seed in seeds]
    stacked: list[Any] = [
        None if column[0] is None else np.stack(column, axis=-2).astype(dtype)
        for column in zip(*parts, strict=True)
    ]
    return Problem(setting, *stacked)


def _one_seed(setting: Setting, seed: int) -> tuple[np.ndarray | None, ...]:
    chance = np.random.default_rng([crc32(setting.name.encode()), seed])
    accepts_EVLP = _accepted(setting, chance)
    K = len(setting.rewards)
    factor_KP = {
        "no": np.ones((K, PROMPTS)),
        "each": LARGEST_FACTOR ** chance.uniform(-1, 1, (K, PROMPTS)),
        "all": LARGEST_FACTOR ** chance.uniform(-1, 1, PROMPTS) * np.ones((K, 1)),
    }
    range_KP = np.stack(
        [reward.range * factor_KP[reward.by_prompt][k] for k, reward in enumerate(setting.rewards)]
    )
    start_VLP = setting.start * chance.normal(size=accepts_EVLP.shape[1:])
    draws_TLGP = chance.random((STEPS, POSITIONS, setting.samples, PROMPTS), np.float32)
    noisy = any(reward.is_noisy for reward in setting.rewards)
    noise_TKGP = chance.random((STEPS, K, setting.samples, PROMPTS), np.float32) if noisy else None
    return accepts_EVLP, range_KP, start_VLP, draws_TLGP, noise_TKGP


def _accepted(setting: Setting, chance: np.random.Generator) -> np.ndarray:
    """accepts_EVLP, with one answer for each prompt that every event without places accepts."""
    tokens_VLP = np.arange(TOKENS)[:, None, None] * np.ones((1, POSITIONS, PROMPTS), int)

    def order(right_LP: np.ndarray, own: bool) -> np.ndarray:
        """Place of each token in a random order that begins with the right one."""
        key_VLP = chance.random((TOKENS, POSITIONS, PROMPTS if own else 1)) * (
            tokens_VLP != right_LP
        )
        place_VLP: np.ndarray = key_VLP.argsort(0).argsort(0)
        return place_VLP

    accepts_EVLP = np.ones((len(setting.events), *tokens_VLP.shape))

    def fill(own: bool, right_LP: np.ndarray) -> None:
        common_VLP = order(right_LP, own=True)
        orders = [order(right_LP, own) for _ in setting.events]
        for e, (accepted_VLP, event) in enumerate(zip(accepts_EVLP, setting.events, strict=True)):
            for part in (part for part in event if part.own == own):
                allowed_VLP = orders[e if part.like is None else part.like] < part.tokens
                if part.places:
                    allowed_VLP = np.isin(common_VLP, part.places)
                accepted_VLP[:, part.position] *= allowed_VLP[:, part.position]

    fill(own=False, right_LP=chance.integers(TOKENS, size=(POSITIONS, 1)))
    # a prompt's own right answer is one that the shared events accept
    key_VLP = chance.random(tokens_VLP.shape) * accepts_EVLP.prod(0)
    fill(own=True, right_LP=key_VLP.argmax(0))
    return accepts_EVLP


def train(
    problem: Problem,
    arm: Callable[[Rewards], np.ndarray],
    rates: Sequence[float],
    optimizer: str = "one scale",
    steps: int = STEPS,
) -> np.ndarray:
    """Return hit_TKQS: each reward's mean over the prompts, over its range, before every step.

    The last step is that of the trained policy, so there are steps + 1. Behind the K rewards stands
    the small one: for each prompt, that of the smallest range which is worth something.
    """
    setting = problem.setting
    S = problem.start_VLSP.shape[2]
    logits = np.repeat(problem.start_VLSP[:, :, None], len(rates), axis=2)
    follow = OPTIMIZERS[optimizer](np.array(rates, logits.dtype))
    bound_K = np.array([reward.bound for reward in setting.rewards], logits.dtype)
    range_KQSP = problem.range_KSP[:, None]
    hit_TKQS = np.empty((steps + 1, len(setting.rewards) + 1, len(rates), S), logits.dtype)
    for t in range(steps):
        pi = _softmax(logits)
        hit_TKQS[t] = _earned(problem, pi)
        tokens_LGQSP = _sample(pi, problem.draws_TLGSP[t])
        raw_KGQSP = _rewards(problem, tokens_LGQSP, t)
        A_GQSP = arm(Rewards.of(raw_KGQSP, bound_K, range_KQSP))
        logits += follow(_gradient(pi, tokens_LGQSP, A_GQSP))
    hit_TKQS[steps] = _earned(problem, _softmax(logits))
    return hit_TKQS


def _softmax(logits: np.ndarray) -> np.ndarray:
    e: np.ndarray = np.exp(logits - logits.max(0))
    e /= e.sum(0)
    return e


def _earned(problem: Problem, pi: np.ndarray) -> np.ndarray:
    """Each reward's expected value over its range, and the small one's; means over the prompts."""
    events, share_KE = problem.setting.events, problem.share_KE
    hit_EQSP = np.ones((len(events), *pi.shape[2:]), pi.dtype)
    for hit_QSP, event, accepts_VLSP in zip(hit_EQSP, events, problem.accepts_EVLSP, strict=True):
        for at in {part.position for part in event}:
            hit_QSP *= np.einsum("vqsp,vsp->qsp", pi[:, at], accepts_VLSP[:, at])
    hit_KQSP = (share_KE @ hit_EQSP.reshape(len(events), -1)).reshape(-1, *pi.shape[2:])
    small_QSP = np.einsum("kqsp,ksp->qsp", hit_KQSP, problem.is_small_KSP)
    return np.concatenate([hit_KQSP, small_QSP[None]]) @ np.full(PROMPTS, 1 / PROMPTS, pi.dtype)


def _sample(pi: np.ndarray, draws_LGSP: np.ndarray) -> np.ndarray:
    """Token numbers (L, G, Q, S, P): how many cumulative probabilities lie below the draw."""
    draws = draws_LGSP[:, :, None]
    up_to = pi[0].copy()
    tokens = np.zeros(np.broadcast_shapes(draws.shape, up_to[:, None].shape), np.uint8)
    for v in range(1, TOKENS):
        tokens += draws > up_to[:, None]
        up_to += pi[v]
    return tokens


def _rewards(problem: Problem, tokens_LGQSP: np.ndarray, t: int) -> np.ndarray:
    events = None
    for at, tokens in enumerate(tokens_LGQSP):
        mask_VSP = problem.mask_VLSP[:, at]
        size = mask_VSP[0].size
        place = tokens * np.int32(size) + np.arange(size, dtype=np.int32).reshape(
            mask_VSP.shape[1:]
        )
        allowed = mask_VSP.ravel().take(place)
        events = allowed if events is None else events & allowed
    raw = []
    for k, reward in enumerate(problem.setting.rewards):
        value = problem.value_KM[k].take(events)
        if problem.noise_TKGSP is not None and reward.is_noisy:
            noise = problem.noise_TKGSP[t, k][:, None]
            value = np.where(noise < reward.wrong, 1 - value, value)
            value = (1 - reward.noise) * value + reward.noise * noise
        raw.append(value * problem.range_KSP[k])
    return np.stack(raw)


def _gradient(pi: np.ndarray, tokens_LGQSP: np.ndarray, A_GQSP: np.ndarray) -> np.ndarray:
    """Mean over samples and prompts of A (onehot - pi), with respect to the logits of a prompt."""
    size = pi[0].size
    L, G = tokens_LGQSP.shape[:2]
    place = tokens_LGQSP * np.intp(size) + np.arange(size).reshape(L, 1, *A_GQSP.shape[1:])
    weights = np.broadcast_to(A_GQSP, place.shape)
    up = np.bincount(place.ravel(), weights.ravel(), minlength=pi.size)
    gradient: np.ndarray = (up.reshape(pi.shape) - pi * A_GQSP.sum(0)) / (G * PROMPTS)
    return gradient.astype(pi.dtype)
