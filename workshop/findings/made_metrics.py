"""The metrics of a made run, column by column.

A run has paths without noise, which a fault may change, and then draws its metrics around them. The
sizes of the noise are those of real runs of this repository. In 79 trainings with verl's trainer
(workshop/experiments/RESULTS.md), the mean of 128 binary rewards scatters 1.00 to 1.05 times as
much as a binomial number. In two runs without a GPU (60 steps), the logarithms scatter by .10
(entropy), .28 (gradient norm), .22 (KL), .24 (largest advantage) and .06 (length), without
correlation from step to step. `Noise` adds correlation and heavy tails.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter
from scipy.special import betaln, expit, logit

Floats = npt.NDArray[np.float64]
Columns = dict[str, Floats]
Range = tuple[float, float]

VARIES = 0.10  # a healthy reward differs in at least this share of the groups
WANDER = 0.05  # of the policy, from step to step, in the logit of a rate
TEST_ROWS = 300  # of each data source
STAGES = 4  # of a curriculum
BEGINS = np.linspace(0.3, 1, 15)  # of a weight with a schedule
ENTROPY, LENGTH = "actor/entropy", "response_length/mean"
KL, KL_LOSS = "actor/ppo_kl", "actor/kl_loss"
LARGEST, SMALLEST = "critic/advantages/max", "critic/advantages/min"
CLIPPED, CUT = "actor/pg_clipfrac", "response_length/clip_ratio"
# {metric: (scatter of the logarithm, lowest and highest start)}
METRICS = {
    ENTROPY: (0.10, 0.05, 1.5),
    "actor/grad_norm": (0.30, 0.02, 5),
    KL: (0.0, 1e-5, 0.02),
    KL_LOSS: (0.25, 1, 1),
    CLIPPED: (0.15, 1e-5, 0.3),
    CUT: (0.15, 1e-3, 0.3),
    LENGTH: (0.06, 25, 4000),
    LARGEST: (0.24, 1.5, 4),
    SMALLEST: (0.24, 1.5, 4),
    "response/aborted_ratio": (0.0, 0.001, 0.001),
}


class Noise(NamedTuple):
    """How noise of size 1 looks from step to step."""

    correlation: float = 0.0  # of a step with the one before
    freedom: float = 0.0  # of Student's t; 0 is the normal distribution

    def draw(self, rng: np.random.Generator, size: int) -> Floats:
        n, of = size + 50, self.freedom  # the first 50 are forgotten
        values = rng.standard_t(of, n) * math.sqrt(1 - 2 / of) if of else rng.normal(0, 1, n)
        fresh = math.sqrt(1 - self.correlation**2)
        return np.asarray(lfilter([fresh], [1, -self.correlation], values)[50:])


@dataclass(frozen=True)
class Shape:
    """What a healthy run does. A run draws from the ranges."""

    curve: str = "rise"  # of the true rate of each reward
    first: Range = (0.1, 0.5)  # the rate
    last: Range = (0.5, 0.95)
    drops: int = 0  # times that harder prompts take up to half of all rewards away at once
    schedule: str = ""  # a weight "ends" or "begins"
    restarts: bool = False  # steps that are repeated or lost
    sources: bool = False
    own_prompts: bool = False  # each reward is of some prompts alone
    spike: int = 0  # steps that one lasts
    opposed: bool = False  # two rewards
    validation: str = "follows"
    entropy: Range = (0.4, 1.2)  # at the end, as a part of the start
    length: Range = (0.8, 1.2)  # the same
    advantages: Range = (0.8, 1.5)  # the same of the largest
    kl: Range = (0.001, 0.1)  # at the end
    wander: float = WANDER
    test_rows: int = TEST_ROWS


class Way(NamedTuple):
    """How a fault comes: `rise` goes from 0 to 1, in this part of the longest time."""

    slow: float
    rise: Callable[[Floats], Floats] = lambda time: time


class Part(NamedTuple):
    """What the runs of tuning, or the held-out ones, are drawn from."""

    seed: int
    healthy: dict[str, Shape]
    lengths: dict[int, int]  # {steps: healthy runs}
    sick_rows: tuple[int, ...]
    ways: tuple[Way, ...]
    noises: tuple[Noise, ...]
    series: tuple[int, ...]  # rewards, or rewards times data sources
    groups: tuple[int, ...]
    samples: tuple[int, ...]
    ranges: tuple[Range, ...]  # of a reward
    gaps: tuple[int, ...]  # steps from a row of the log to the next
    every: tuple[int, ...]  # rows from a validation to the next


class Maker:
    """Draws the size and the paths of a run, and then its metrics."""

    def __init__(self, rng: np.random.Generator, part: Part, rows: int, shape: Shape) -> None:
        self.rng, self.rows, self.shape = rng, rows, shape
        self.time = np.linspace(0, 1, rows)
        noise = part.noises[rng.integers(len(part.noises))]
        self.noise: Callable[[], Floats] = lambda: noise.draw(rng, rows)
        self.groups, self.samples = int(rng.choice(part.groups)), int(rng.choice(part.samples))
        self.low, self.high = part.ranges[rng.integers(len(part.ranges))]
        self.gap, self.every = int(rng.choice(part.gaps)), int(rng.choice(part.every))
        self.series = int(rng.choice(part.series))
        self.sources = [*"abcd"[: math.gcd(self.series, 4)]] if shape.sources else ["a"]
        count = self.series // len(self.sources)
        self.names = ["correctness", "format", *(f"reward{k}" for k in range(count))][:count]
        self.spread = [self.log_uniform(0.5, 8) for _ in self.names]  # small: all or none
        self.rates = [self._rate(spread) for spread in self.spread]
        stays = shape.validation == "stays"
        self.tests = [rate[0] + 0 * rate if stays else rate for rate in self.rates]
        self.weights = [np.full(rows, rng.uniform(0.4, 1)) for _ in self.names]
        if shape.schedule == "ends":
            self.weights[-1] *= 1 - self.time
        elif shape.schedule == "begins":
            self.weights[-1][: len(BEGINS)] *= BEGINS
        self.missing = [rng.uniform(0, 0.9) * shape.own_prompts for _ in self.names]
        self.varies: dict[int, Floats] = {}  # {reward: the share of groups}, where a fault sets it
        self.shares: dict[int, float] = {}  # {reward: part of its fair share}, the same
        self.paths = {
            name: np.full(rows, self.log_uniform(*of)) for name, (_, *of) in METRICS.items()
        }
        self.paths[KL_LOSS] *= 1 - np.exp(-self.time * self.uniform(1, 20))
        ends = {ENTROPY: shape.entropy, LENGTH: shape.length, "actor/grad_norm": (0.2, 5.0)}
        for name, of in (ends | dict.fromkeys((LARGEST, SMALLEST), shape.advantages)).items():
            self.paths[name] *= self.log_uniform(*of) ** self.time
        self.paths[KL_LOSS] *= self.log_uniform(*shape.kl)

    def uniform(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def log_uniform(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def _rate(self, spread: float) -> Floats:
        """The true mean of a binary reward; it differs in at least `VARIES` of the groups."""
        first, last = self.log_uniform(*self.shape.first), self.uniform(*self.shape.last)
        curves = {
            "flat": np.ones(self.rows),
            "rise": 1 - np.exp(-self.time * self.uniform(2, 12)),
            "late": expit(20 * (self.time - self.uniform(0.4, 0.9))),
            "stairs": np.floor(self.time * 4) / 4,
            "wave": 0.6 + 0.15 * np.sin(self.time * self.uniform(10, 60)),
        }
        # These are here, so that the other curves draw the same numbers as before.
        if self.shape.curve == "plateaus":
            steps = [expit(40 * (self.time - at)) for at in self.rng.uniform(0.1, 0.9, 3)]
            curves["plateaus"] = np.mean(steps, axis=0)
        if self.shape.curve == "curriculum":
            # Each stage is learned, and the next one is harder: all rewards begin anew, though not
            # from as low.
            stage = np.floor(self.time * STAGES * 0.999)
            within = self.time * STAGES - stage
            learned = 1 - np.exp(-4 * within)
            left = self.uniform(0.6, 0.9)
            curves["curriculum"] = np.where(stage == 0, learned, left + (1 - left) * learned)
        rate = first + (last - first) * curves[self.shape.curve]
        for _ in range(self.shape.drops):
            rate[self.rng.integers(self.rows // 4, self.rows) :] *= self.uniform(0.5, 0.9)
        grid = np.linspace(0, 1, 1001)
        differs = grid[self._differs(grid, spread) >= VARIES]
        return np.asarray(np.clip(rate, differs[0], differs[-1]))

    def _differs(self, rate: Floats, spread: float) -> Floats:
        """The share of groups neither all 1 nor all 0: prompts have a beta distribution."""
        a, b, n = rate * spread + 1e-9, (1 - rate) * spread + 1e-9, self.samples
        ones, zeros = betaln(a + n, b) - betaln(a, b), betaln(a, b + n) - betaln(a, b)
        return np.asarray(np.clip(1 - np.exp(ones) - np.exp(zeros), 0, 1))

    def columns(self, plain: bool) -> Columns:
        """All metrics, NaN where a row has none; `plain` is a run of verl without ours."""
        found = {
            name: path * np.exp(METRICS[name][0] * self.noise())
            for name, path in self.paths.items()
        }
        found[KL] *= 1 + self.noise() * (found[KL] < 0.03)
        found[SMALLEST] *= -1
        found |= {name: np.minimum(found[name], 1) for name in (CLIPPED, CUT)}
        if self.shape.spike:
            self._spikes(found)
        wanders = [self.shape.wander * self.noise() for _ in self.names]
        rewards = [self._of_reward(k, wander) for k, wander in enumerate(wanders)]
        found |= {
            f"critic/score/{what}": np.sum([of[what] for of in rewards], axis=0)
            for what in ("mean", "min", "max")
        }
        for source in self.sources:
            tests = [*map(self._tested, self.tests, wanders)]
            if plain:
                found[f"val-core/{source}/reward/mean@1"] = np.sum(tests, axis=0)
            else:
                names = [f"val-aux/{source}/{name}/mean@1" for name in self.names]
                found |= dict(zip(names, tests, strict=True))
        if plain:
            return found
        for name, of in zip(self.names, rewards, strict=True):
            found |= {f"gdpo/{name}/{what}": values for what, values in of.items()}
        return found | self._shares([of["varies"] for of in rewards])

    def _drawn(self, rate: Floats, wander: Floats, count: int, wider: float = 1.0) -> Floats:
        true = expit(logit(np.clip(rate, 1e-6, 1 - 1e-6)) + wander)
        drawn = true + wider * (self.rng.binomial(count, true) / count - true)
        return np.asarray(np.clip(drawn, 0, 1))

    def _of_reward(self, k: int, wander: Floats) -> Columns:
        count = max(2, round(self.groups * (1 - self.missing[k])))  # groups
        # up to 1.3 times the noise of a binomial, since samples of a group resemble each other
        mean = self._drawn(self.rates[k], wander, count * self.samples, self.uniform(1.0, 1.3))
        differs = self.varies.get(k, self._differs(self.rates[k], self.spread[k]))
        found = {
            "mean": self.low + (self.high - self.low) * mean,
            "min": np.where(mean < 1, self.low, self.high),
            "max": np.where(mean > 0, self.high, self.low),
            "varies": self.rng.binomial(count, differs) / count,
            "missing": np.full(self.rows, self.missing[k]),
        }
        is_bounded = self.rng.random() < 0.7
        return found | ({"at_high": mean} if is_bounded else {})

    def _tested(self, rate: Floats, wander: Floats) -> Floats:
        """A validation: it has the wander of the policy, and noise of its own."""
        values = self.low + (self.high - self.low) * self._drawn(rate, wander, self.shape.test_rows)
        values[np.arange(self.rows) % self.every != self.every - 1] = np.nan
        return values

    def _shares(self, varies: list[Floats]) -> Columns:
        """Energies go with the squared weight and the groups that differ; shares add up to 1."""
        present = np.array(varies) * (1 - np.array(self.missing))[:, None] + 1e-12
        energy = np.array(self.weights) ** 2 * present + 1e-12
        if self.shape.opposed:  # up to .8 of the smaller one of two is cancelled
            energy[:2] -= self.uniform(0.2, 0.8) * energy[:2].min(0) * (len(energy) > 1)
        part = energy / energy.sum(0)
        for k, of_fair in self.shares.items():
            part[k] = of_fair * present[k] / present.sum(0)
        noise = np.sqrt(np.abs(part) / (self.groups * self.samples))
        return {
            f"gdpo/{name}/share": part[k] + self.noise() * noise[k]
            for k, name in enumerate(self.names)
        }

    def _spikes(self, columns: Columns) -> None:
        for name in ("actor/grad_norm", KL, KL_LOSS, LARGEST, ENTROPY):
            at = self.rng.random(self.rows) < 0.02 / self.shape.spike
            for _ in range(self.shape.spike - 1):
                at[1:] |= at[:-1]
            columns[name][at] *= 0.1 if name == ENTROPY else self.log_uniform(5, 200)
