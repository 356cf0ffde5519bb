"""GDPO as plain Python loops over floats: slow, easy to check, and without our code."""

import math


def mean_std(values, counts=None):
    counts = counts or [1] * len(values)
    total = sum(counts)
    mean = math.fsum(v * c for v, c in zip(values, counts, strict=True)) / total
    square = math.fsum(c * (v - mean) ** 2 for v, c in zip(values, counts, strict=True))
    return mean, math.sqrt(square / (total - 1)) if total > 1 else 0.0


def gdpo(
    rewards,
    groups,
    *,
    weights=None,
    present=None,
    valid=None,
    lengths=None,
    group_norm="per_reward",
    normalize_by_std=True,
    batch_norm="sample",
    eps=1e-4,
):
    """The advantage of each sample, as a list of floats. Weights may be a row for each sample."""
    n, k = len(rewards), len(rewards[0])
    weights = weights or [1.0] * k
    weights = weights if isinstance(weights[0], list) else [weights] * n
    present = present or [[True] * k for _ in range(n)]
    valid = valid or [True] * n
    # step 3 is over the samples that have a reward with a weight
    counted = [
        v and any(p and w != 0 for p, w in zip(there, of_row, strict=True))
        for v, there, of_row in zip(valid, present, weights, strict=True)
    ]
    if group_norm == "summed":
        rewards = [
            [sum(w * r for w, r, p in zip(of_row, row, there, strict=True) if p)]
            for of_row, row, there in zip(weights, rewards, present, strict=True)
        ]
        present, weights, k = [[True]] * n, [[1.0]] * n, 1

    summed = [0.0] * n
    for group in set(groups):
        for j in range(k):
            rows = [i for i in range(n) if groups[i] == group and valid[i] and present[i][j]]
            values = [float(rewards[i][j]) for i in rows]
            if len(rows) < 2 or min(values) == max(values):
                continue
            mean, std = mean_std(values)
            for i in rows:
                scale = std + eps if normalize_by_std else 1.0
                summed[i] += weights[i][j] * (float(rewards[i][j]) - mean) / scale

    if batch_norm == "none":
        return summed
    counts = [1] * n if batch_norm == "sample" else list(lengths)
    rows = [i for i in range(n) if counted[i] and counts[i]]
    values = [summed[i] for i in rows]
    if not values or min(values) == max(values):
        return [0.0] * n
    mean, std = mean_std(values, [counts[i] for i in rows])
    return [(summed[i] - mean) / (std + eps) if counted[i] else 0.0 for i in range(n)]
