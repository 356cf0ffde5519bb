"""Each variant of step 2, compared with a naive loop, at its limits and in edge cases."""

import functools
import math

import numpy as np
import oracle
import pytest
import torch
from drawn_batches import batches, random_batch
from hypothesis import given
from hypothesis import strategies as st

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.equation import compute_gdpo_scalars
from verl_gdpo.algorithm.variants import VARIANTS, dara, dvao, gd2po, rvpo, sa_mrpo

# --- the same formulas as loops over floats ------------------------------------------------------


def z_of(batch):
    """z of every sample and reward, as nested lists."""
    n, k = len(batch["rewards"]), len(batch["rewards"][0])
    columns = []
    for j in range(k):
        rewards = [[row[j]] for row in batch["rewards"]]
        present = [[row[j]] for row in batch["present"]]
        columns.append(
            oracle.gdpo(
                rewards, batch["groups"], present=present, valid=batch["valid"], batch_norm="none"
            )
        )
    return [[columns[j][i] for j in range(k)] for i in range(n)]


def rvpo_loop(z, batch, k):
    total = sum(batch["weights"])
    shares = [w / total if total else 0.0 for w in batch["weights"]]
    result = []
    for row in z:
        terms = [(share, value) for share, value in zip(shares, row, strict=True) if share > 0]
        low = min((value for _, value in terms), default=0.0)
        mean = math.fsum(share * math.exp(-k * (value - low)) for share, value in terms)
        result.append(low - math.log(mean) / k if terms else 0.0)
    return result


def dara_loop(z, batch, mode="symmetric", maximum=5.0):
    used = [j for j, w in enumerate(batch["weights"]) if w]
    varying = {
        j: {g for g, row in zip(batch["groups"], z, strict=True) if row[j] != 0} for j in used
    }
    most = max((len(groups) for groups in varying.values()), default=0)
    result = []
    for row in z:
        total = 0.0
        for j in used:
            if varying[j]:
                factor = min(maximum, math.sqrt(most / len(varying[j])))
                c = batch["weights"][j] * row[j]
                if mode == "symmetric":
                    total += factor * c
                else:
                    total += c + (factor - 1) * max(c, 0.0)
        result.append(total)
    return result


def sa_mrpo_loop(z, batch, bounds_K, gamma=0.5):
    factors = []
    for j, (low, high) in enumerate(bounds_K):
        values = [
            row[j]
            for row, there, real in zip(
                batch["rewards"], batch["present"], batch["valid"], strict=True
            )
            if there[j] and real
        ]
        reached = (math.fsum(values) / len(values) - low) / (high - low) if values else 0.0
        factors.append(batch["weights"][j] * max(0.0, 1 - reached) ** gamma)
    return [sum(f * value for f, value in zip(factors, row, strict=True)) for row in z]


def gd2po_loop(z, batch, tau):
    result = []
    for row in z:
        c = [w * value for w, value in zip(batch["weights"], row, strict=True)]
        conflict = max(c) > 0 > min(c)
        dropped = conflict and abs(sum(c)) / sum(map(abs, c)) < tau
        result.append(0.0 if dropped else sum(c))
    return result


def dvao_loop(z, batch):
    result = [0.0] * len(z)
    for group in set(batch["groups"]):
        scale, numerators = 0.0, dict.fromkeys(range(len(z)), 0.0)
        for j, weight in enumerate(batch["weights"]):
            rows = [
                i
                for i in range(len(z))
                if batch["groups"][i] == group and batch["valid"][i] and batch["present"][i][j]
            ]
            values = [float(batch["rewards"][i][j]) for i in rows]
            if len(values) < 2 or min(values) == max(values):
                continue
            mean, std = oracle.mean_std(values)
            scale += weight * std
            for i in rows:
                numerators[i] += weight * (values[rows.index(i)] - mean)
        for i, numerator in numerators.items():
            if batch["groups"][i] == group and scale > 0:
                result[i] = numerator / scale
    return result


# --- against the loops ---------------------------------------------------------------------------

BOUNDS = (-4.0, 8.0)
POSITIVE, ANY = st.floats(0, 3, width=16), st.floats(-3, 3, width=16)
REWARD = st.one_of(st.sampled_from([-3.0, 0.0, 0.1, 0.3, 1.0, 3.0]), st.floats(-4, 8, width=16))


def scalars(batch, **options):
    return compute_gdpo_scalars(
        torch.tensor(batch["rewards"], dtype=torch.float64),
        batch["groups"],
        weights=batch["weights"],
        present_BK=batch["present"],
        valid_B=batch["valid"],
        **options,
    )


LOOPS = {
    rvpo: (rvpo_loop, POSITIVE, {"k": st.sampled_from([1e-3, 0.5, 1.0, 30.0, 1000.0])}),
    dara: (
        dara_loop,
        ANY,
        {
            "mode": st.sampled_from(["symmetric", "asymmetric"]),
            "maximum": st.sampled_from([1.0, 1.2, 5.0]),
        },
    ),
    sa_mrpo: (sa_mrpo_loop, POSITIVE, {"gamma": st.sampled_from([0.0, 0.5, 2.0])}),
    gd2po: (gd2po_loop, ANY, {"tau": st.sampled_from([0.0, 0.137, 0.7311, 1.0])}),
    dvao: (dvao_loop, POSITIVE, {}),
}


@pytest.mark.parametrize("variant", LOOPS)
@given(data=st.data())
def test_a_variant_equals_its_loop(variant, data):
    loop, weight, parameters = LOOPS[variant]
    batch = data.draw(batches(REWARD, weight, st.booleans() | st.just(True)))
    chosen = data.draw(st.fixed_dictionaries(parameters))
    if variant is sa_mrpo:
        chosen["bounds_K"] = [BOUNDS] * len(batch["weights"])
    S = scalars(batch, combine=functools.partial(variant, **chosen), batch_norm="none").S_B.tolist()
    assert pytest.approx(loop(z_of(batch), batch, **chosen), abs=1e-8, rel=1e-7) == S


# --- numbers by hand -----------------------------------------------------------------------------

H = 1 / math.sqrt(2)  # |z| in a group of two that differ


def by_hand(rewards, groups, combine, weights=None):
    result = compute_gdpo_scalars(
        rewards, groups, combine=combine, weights=weights, batch_norm="none", eps=0
    )
    return result.S_B.tolist()


# reward 0 varies in 4 groups, reward 1 in 1 of them: factors 1 and sqrt(4) = 2
RARE = [[0, 0], [1, 1], *[[0, 0], [1, 0]] * 3]
PAIRS = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({}, -3 * H, 3 * H),
        ({"mode": "asymmetric"}, -2 * H, 3 * H),
        ({"maximum": 1.5}, -2.5 * H, 2.5 * H),
    ],
)
def test_dara_by_hand(options, low, high):
    S = by_hand(RARE, PAIRS, functools.partial(dara, **options))
    assert pytest.approx([low, high, *[-H, H] * 3]) == S


def test_sa_mrpo_by_hand():
    # batch means 3/4 of [0, 1] and 2 of [-2, 14]: factors sqrt(1/4) and sqrt(3/4)
    rewards, bounds = [[0, 2], [1, 2], [1, 1], [1, 3]], [(0, 1), (-2, 14)]
    S = by_hand(rewards, [0, 0, 1, 1], functools.partial(sa_mrpo, bounds_K=bounds))
    assert pytest.approx([-H / 2, H / 2, -H * math.sqrt(0.75), H * math.sqrt(0.75)]) == S


# --- limits --------------------------------------------------------------------------------------


def assert_same(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def of(combine, rewards, groups, **options):
    return compute_gdpo_scalars(rewards, groups, combine=combine, **options)


def test_rvpo_with_small_k_is_gdpo_up_to_a_scale():
    rewards, groups = random_batch()
    weights = [1.0, 2.0, 0.5]
    gdpo = of(None, rewards, groups, weights=weights)
    for k in (1e-7, 1e-12):
        small = of(functools.partial(rvpo, k=k), rewards, groups, weights=weights)
        assert_same(small.S_B, gdpo.S_B / 3.5, atol=2 * k)
    near = of(functools.partial(rvpo, k=1e-9), rewards, groups, weights=weights, eps=0)
    assert_same(near.A_B, of(None, rewards, groups, weights=weights, eps=0).A_B, atol=1e-8)


def test_rvpo_with_large_k_is_the_minimum():
    rewards, groups = random_batch()
    large = of(functools.partial(rvpo, k=1e9), rewards, groups)
    assert_same(large.S_B, large.z_BK.amin(dim=1), atol=2e-9)


def test_rvpo_where_the_lowest_reward_has_next_to_no_weight():
    # the mean of exp(-k (z - low)) is then far below 1: 1e-20 + exp(-2 k h)
    S = by_hand([[0, 1], [1, 0]], [0, 0], functools.partial(rvpo, k=20.0), weights=[1e-20, 1])
    mean = 1e-20 + math.exp(-40 * H)
    assert S[0] == pytest.approx(-H - math.log(mean) / 20, rel=1e-12)


def test_dara_multiplies_by_5_at_most_unless_told():
    # the first reward varies in 49 pairs, the second in one: the root of 49 is 7
    rewards = [[0.0, 0.0], [1.0, 1.0]] + [[0.0, 0.5], [1.0, 0.5]] * 48
    groups = [i // 2 for i in range(98)]
    assert by_hand(rewards, groups, dara)[1] == pytest.approx((1 + 5) * H)
    more = functools.partial(dara, maximum=9)
    assert by_hand(rewards, groups, more)[1] == pytest.approx((1 + 7) * H)


# --- edges ---------------------------------------------------------------------------------------

EVERY = {
    "sum": None,
    "rvpo": functools.partial(rvpo, k=1.5),
    "dara": dara,
    "asymmetric": functools.partial(dara, mode="asymmetric"),
    "sa_mrpo": functools.partial(sa_mrpo, bounds_K=[BOUNDS] * 3),
    "gd2po": functools.partial(gd2po, tau=0.4),
    "dvao": dvao,
}
every_variant = pytest.mark.parametrize("combine", EVERY.values(), ids=EVERY)


def test_every_variant_is_tried_here():
    assert {*VARIANTS} == {*EVERY} - {"sum", "asymmetric"}


@every_variant
def test_without_signal_S_is_exactly_0(combine):
    constant = torch.full((4, 3), 0.3)
    assert of(combine, constant, [0, 0, 1, 1]).A_B.tolist() == [0.0] * 4
    # a constant group beside one with signal, and a singleton
    rewards = torch.cat([constant, random_batch(n=4)[0], constant[:1]])
    S_B = of(combine, rewards, [0] * 4 + [1] * 4 + [2]).S_B
    assert S_B[:4].tolist() == [0.0] * 4 and S_B[8].item() == 0.0
    assert S_B[4:8].abs().max() > 0.1


@every_variant
@pytest.mark.parametrize("batch_norm", ["sample", "none"])
def test_padding_enters_no_statistic(combine, batch_norm):
    rewards, groups = random_batch(n=8)
    padded = torch.cat([torch.full((3, 3), float("nan"), dtype=torch.float64), rewards])
    mask = torch.tensor([[0]] * 3 + [[1]] * 8)
    options = {"combine": combine, "batch_norm": batch_norm}
    advantages = compute_gdpo_advantage(padded, [0, 0, 99, *groups], mask, **options)
    assert advantages[:3].tolist() == [[0.0]] * 3
    expected = compute_gdpo_advantage(rewards, groups, torch.ones(8, 1), **options)
    torch.testing.assert_close(advantages[3:], expected)
    only_padding = compute_gdpo_advantage(padded[:3], [0, 0, 1], mask[:3], **options)
    assert only_padding.tolist() == [[0.0]] * 3


@every_variant
def test_all_weights_0_is_0(combine):
    rewards, groups = random_batch()
    assert of(combine, rewards, groups, weights=[0, 0, 0]).A_B.tolist() == [0.0] * 24


# not rvpo, whose soft minimum of z and -z is below 0, nor asymmetric dara, whose sum is above it
ADDITIVE = {
    "dara": dara,
    "sa_mrpo": functools.partial(sa_mrpo, bounds_K=[BOUNDS] * 4, gamma=0),
    "gd2po": functools.partial(gd2po, tau=0),
    "dvao": dvao,
}


@pytest.mark.parametrize("combine", ADDITIVE.values(), ids=ADDITIVE)
@pytest.mark.parametrize("weight", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("G", [2, 3, 16])
def test_rewards_that_cancel_give_exactly_0(combine, weight, G):
    rng = np.random.default_rng(G)
    a, b = rng.random(24 * G).round(1), rng.random(24 * G)
    b[G:] = 0.5  # varies in one group alone, so that dara multiplies it
    rewards = np.stack([a, 1 - a, b, 1 - b], axis=1)
    options = {"weights": [weight] * 4, "eps": 0, "batch_eps": 0, "combine": combine}
    result = compute_gdpo_scalars(rewards, np.arange(24 * G) // G, **options)
    assert not result.S_B.any() and not result.A_B.any()


def test_a_value_may_leave_its_bounds_by_a_millionth_of_their_distance():
    def of(value, low, high):
        combine = functools.partial(sa_mrpo, bounds_K=[(low, high)])
        return by_hand([[value], [(low + high) / 2]], [0, 0], combine)

    for low, high in ((0.0, 1.0), (100.0, 104.0)):
        slack = 1e-6 * (high - low)
        # more than all of the room is none of it, not the root of a number below 0
        for value in (low - slack, low, high, high + slack):
            assert all(map(math.isfinite, of(value, low, high)))
        for value in (low - 1.01 * slack, high + 1.01 * slack):
            with pytest.raises(ValueError, match=r"sa_mrpo bounds_K\[0\].*: a reward is"):
                of(value, low, high)


def test_outside_its_bounds_the_room_of_a_reward_is_none_or_all():
    # means of the batch: 1 + 1e-7 of the range above, and below, what is left to reach
    for values, room in (([1.0, 1.0 + 2e-7], 0.0), ([0.0, -2e-7], 1.0)):
        combine = functools.partial(sa_mrpo, bounds_K=[(0, 1)], gamma=1)
        S = by_hand([[value] for value in values], [0, 0], combine)
        assert max(map(abs, S)) == pytest.approx(room * H, abs=1e-9)


def test_the_value_furthest_outside_is_named():
    combine = functools.partial(sa_mrpo, bounds_K=[(1, 3)])
    with pytest.raises(ValueError, match=r"bounds_K\[0\]=\(1, 3\): a reward is -10.0"):
        by_hand([[12], [-10]], [0, 0], combine)


# --- refused -------------------------------------------------------------------------------------

SIMPLE = ([[0.0, 1.0], [1.0, 3.0]], [0, 0])


def bounded(*bounds_K, **parameters):
    return functools.partial(sa_mrpo, bounds_K=bounds_K, **parameters)


@pytest.mark.parametrize(
    ("combine", "options", "message"),
    [
        (functools.partial(rvpo, k=0), {}, "rvpo k: expected a number above 0, got 0"),
        (functools.partial(rvpo, k="1"), {}, "rvpo k: expected a number above 0, got '1'"),
        (functools.partial(rvpo, k=True), {}, "rvpo k: expected a number above 0, got True"),
        (functools.partial(rvpo, k=1), {"weights": [1, -1]}, "rvpo: expected weights of 0 or more"),
        (functools.partial(dara, mode="both"), {}, "dara mode: expected one of"),
        (functools.partial(dara, maximum=0.5), {}, "dara maximum: expected a number at least 1"),
        (functools.partial(gd2po, tau=1.5), {}, "gd2po tau: expected a number at least 0 and"),
        (dvao, {"weights": [1, -1]}, "dvao: expected weights of 0 or more"),
        (bounded((0, 1), (0, 3), gamma=-1), {}, "sa_mrpo gamma: expected a number at least 0, got"),
        (bounded((0, 1)), {}, "bounds_K: expected 2, got 1"),
        (bounded((0, 1), (0, 3)), {"weights": [1, -1]}, "sa_mrpo: expected weights of 0 or more"),
        (bounded((0, 1), None), {}, r"bounds_K\[1\]: expected \("),
        (bounded((1, 1), (0, 3)), {}, r"bounds_K\[0\]: expected \("),
        (bounded((-math.inf, 1), (0, 3)), {}, r"bounds_K\[0\]: expected \("),
        (bounded((0, 1), (0, math.inf)), {}, r"bounds_K\[1\]: expected \("),
        (bounded((0, 1), (0, 2)), {}, r"bounds_K\[1\]=\(0, 2\): a reward is 3.0"),
        (dara, {"group_norm": "summed"}, "combine needs group_norm='per_reward'"),
        (lambda z, *_: z, {}, r"combine: expected a tensor of shape \(2,\), got \(2, 2\)"),
        (lambda *_: 1.0, {}, r"combine: expected a tensor of shape \(2,\), got float"),
        (lambda z, *_: z[:, 0] / 0, {}, "combine: S is -inf in row 0"),
    ],
)
def test_what_cannot_work_is_named(combine, options, message):
    with pytest.raises(ValueError, match=message):
        of(combine, *SIMPLE, **options)


def test_a_function_of_ones_own():
    def product(z_BK, rewards_BK, group_index_B, weights_K, present_BK, valid_B):
        assert rewards_BK.tolist() == SIMPLE[0]
        assert (group_index_B.tolist(), weights_K.tolist()) == ([0, 0], [2.0, 1.0])
        assert present_BK.all() and valid_B.all()
        assert {z_BK.dtype, rewards_BK.dtype, weights_K.dtype} == {torch.float64}
        return z_BK.prod(dim=1).float()

    result = of(product, *SIMPLE, weights=[2, 1], eps=0, batch_norm="none")
    assert of(lambda *got: got[3], *SIMPLE, batch_norm="none").S_B.tolist() == [1.0, 1.0]
    assert result.S_B.tolist() == pytest.approx([0.5, 0.5])
    assert result.S_B.dtype == torch.float64
