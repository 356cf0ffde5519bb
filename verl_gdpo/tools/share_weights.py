"""Factors on the weights of rewards, under which each reward has a given share of the update.

With factors f, the sum of a sample is S_B = c_BK f, where c_BK are the contributions before. The
shares are f (Q f) / (f' Q f), with Q = c' c. Shares of a portfolio's risk have the same equations.
Shape suffixes: B samples, K rewards.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import optimize

from verl_gdpo.algorithm.zero import SAME_SHARE, SOLVED, Floats

RANDOM_STARTS = 200
# After so many exact ends, the nearest one is taken to be among them.
ENOUGH = 10
# This is the standard deviation of the logarithm of a random factor.
SPREAD_OF_STARTS = 3.0
# A smaller factor, beside the largest and in units of one over its reward's own spread, leaves the
# reward a share that cannot be told from 0.
SMALLEST_LOG = math.log(SAME_SHARE / 100)
# A solver makes so many steps from one start, and so many sweeps over the convex problem.
STEPS_OF_SOLVER = 200
SWEEPS = 1_000


class Factors(NamedTuple):
    """What was found: the largest factor is 1."""

    factor_K: Floats
    share_K: Floats  # with these factors
    missed: float  # the largest difference from the given shares

    @property
    def is_exact(self) -> bool:
        return self.missed < SAME_SHARE


def shares(square_KK: Floats, factor_K: Floats) -> Floats:
    """Return the share of each reward with these factors; 0 if they cancel."""
    part_K = factor_K * (square_KK @ factor_K)
    return np.asarray(part_K / (part_K.sum() or 1.0))


def factors_with_shares(square_KK: Floats, target_K: Floats, near_K: Floats) -> Factors:
    """Return positive factors with these shares, or else the nearest shares that were found.

    One start of a solver can end where no factors keep the shares although others do. So it starts
    where the equations can be solved for sure, and otherwise at many places. For two rewards, and
    for any number of them if all shares are above 0, no exact factors are missed. For more rewards
    with a share of 0 or below, one of the many starts has to lead to them.

    Args:
        square_KK: Q, with a diagonal above 0.
        target_K: shares, which add up to 1.
        near_K: positive factors. Of several solutions, the one that is nearest to these is
            returned: shares below 0 can have two and more, which say different things.
    """
    unit_K = 1 / np.sqrt(np.diag(square_KK))
    correlation_KK = square_KK * np.outer(unit_K, unit_K)
    near_in_units_K = near_K / unit_K

    ends = []
    for start_K in _solutions(correlation_KK, target_K):
        ends.append(_solved_from(start_K, correlation_KK, target_K))
    exact = [end for end in ends if end.is_exact]
    if not exact:
        for start_K in _many_starts(near_in_units_K):
            end = _solved_from(start_K, correlation_KK, target_K)
            ends.append(end)
            if end.is_exact:
                exact.append(end)
            if len(exact) == ENOUGH:
                break

    if exact:
        best = min(exact, key=lambda end: _distance(end.factor_K, near_in_units_K))
    else:
        best = min(ends, key=lambda end: end.missed)
    factor_K = best.factor_K * unit_K
    return best._replace(factor_K=factor_K / factor_K.max())


def _distance(factor_K: Floats, near_K: Floats) -> float:
    """Return how far the ratios of factors are from other ratios."""
    return float(np.std(np.log(factor_K / near_K)))


def _solved_from(start_K: Floats, square_KK: Floats, target_K: Floats) -> Factors:
    """Improve the logarithms of factors until the shares are the target, as far as it goes."""

    def missed(log_K: Floats) -> Floats:
        return shares(square_KK, _factors(log_K)) - target_K

    def slopes(log_K: Floats) -> Floats:
        factor_K = _factors(log_K)
        products_KK = np.outer(factor_K, factor_K) * square_KK
        part_K = products_KK.sum(axis=1)
        total = part_K.sum() or 1.0
        of_parts_KK = products_KK + np.diag(part_K)
        of_total_K = 2 * part_K
        return np.asarray((of_parts_KK - np.outer(part_K / total, of_total_K)) / total)

    solution = optimize.least_squares(
        missed,
        np.log(start_K),
        jac=slopes,
        method="lm",
        xtol=SOLVED,
        ftol=SOLVED,
        gtol=SOLVED,
        max_nfev=STEPS_OF_SOLVER,
    )
    factor_K = _factors(solution.x)
    reached_K = shares(square_KK, factor_K)
    return Factors(factor_K, reached_K, float(np.abs(reached_K - target_K).max()))


def _factors(log_K: Floats) -> Floats:
    """Return factors without overflow; the scale of all of them together changes no share."""
    factor_K: Floats = np.exp(np.maximum(log_K - log_K.max(), SMALLEST_LOG))
    return factor_K


def _solutions(correlation_KK: Floats, target_K: Floats) -> Iterator[Floats]:
    """Yield all factors with these shares, nearly, for problems that can be solved for sure."""
    if len(target_K) == 2:
        yield from _solutions_of_two(correlation_KK[0, 1], target_K[0])
    elif (target_K > 0).all():
        yield _solution_above_0(correlation_KK, target_K)


def _many_starts(near_K: Floats) -> Iterator[Floats]:
    """Yield factors from which to solve; rewards are in units of their own spread."""
    yield near_K
    rng = np.random.default_rng(0)
    for _ in range(RANDOM_STARTS):
        yield np.exp(SPREAD_OF_STARTS * rng.normal(size=len(near_K)))


def _solutions_of_two(correlation: float, first: float) -> Iterator[Floats]:
    """Yield all factors (1, x) under which the first of two rewards has this share.

    (1 + r x) / (1 + 2 r x + x x) = first is a quadratic equation for x.
    """
    for x in np.roots([first, (2 * first - 1) * correlation, first - 1]):
        if np.isreal(x) and x.real > 0:
            yield np.array([1.0, x.real])


def _solution_above_0(correlation_KK: Floats, target_K: Floats) -> Floats:
    """Return the factors with these shares, all above 0, or nearly so.

    Where f' C f / 2 - target' log f is least, f (C f) = target. This function is convex, so there
    is one such place, if f' C f is above 0 for all f. (Spinu, "An algorithm for computing risk
    parity weights", 2013.) It is lowered for one factor after the other, by a quadratic equation.
    """
    factor_K = np.sqrt(target_K)
    for _ in range(SWEEPS):
        for k, share in enumerate(target_K):
            of_others = correlation_KK[k] @ factor_K - factor_K[k]
            root = np.sqrt(of_others * of_others + 4 * share)
            # Two forms of the same root: neither subtracts two numbers that are nearly the same.
            if of_others > 0:
                factor_K[k] = 2 * share / (root + of_others)
            else:
                factor_K[k] = (root - of_others) / 2
        missed_K = factor_K * (correlation_KK @ factor_K) - target_K
        if np.abs(missed_K).max() < SAME_SHARE:
            break
    return np.asarray(factor_K)
