"""Made metrics of runs whose label is known: healthy ones, and ones with one fault that begins.

The labels were fixed before the rules were tuned. The noise is that of real runs of this
repository. In the 79 trainings of `workshop/experiments/trainer`, the mean of 128 binary rewards
scatters 1.00 to 1.05 times as much as a binomial number. In two runs without a GPU (60 steps), the
logarithms scatter by .10 (entropy), .28 (gradient norm), .22 (KL), .24 (largest advantage) and .06
(length), without correlation from step to step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaln

Floats = npt.NDArray[np.float64]
Columns = dict[str, Floats]  # NaN stands for null in the log, ABSENT for a step without the metric
ABSENT = np.inf

HEALTHY = (
    "flat",
    "learning",
    "plateau",  # of validation alone: training goes on to rise
    "saturated",
    "curriculum",  # harder prompts take up to half of the reward away at once
    "weight schedule",  # a reward ends
    "restarts",  # steps that are repeated or lost, and null values
    "sources",
    "spikes",  # of gradient, KL and entropy for one step
    "sparse",
    "lengthening",  # longer answers, falling entropy, a growing KL
    "trade-off",  # two rewards that oppose each other
)
WRECKED = (
    "reward is NaN for 30 steps",
    "gradient is NaN",
    "gradient norm 22,000",
    "entropy 1e-4",
    "KL .4 where it was .001",
    "KL to the reference .4 where it was .001",
    "|A| grows e^10",
    "correctness .62 to .016 at once",
    "correctness .62 to .016 slowly",
)
OVERFITTING = {200: 0.10, 500: 0.06, 2000: 0.03}  # {rows of validation: how far it falls}
LENGTHS = (60, 500, 5000)
VALIDATIONS = {60: 30, 500: 50, 5000: 100}  # of a run that overfits; others have fewer too


@dataclass(frozen=True)
class MadeRun:
    """rows: (step, metrics) in the order in which a run logs them; a resume goes back in steps."""

    kind: str
    steps: int
    seed: int
    rows: list[tuple[int, dict[str, float]]]
    begin: int | None = None  # the step at which the fault begins; None for a healthy run
    onset: int | None = None  # the step from which on it is plain to see


def healthy_runs(seeds: range, steps: int) -> Iterator[MadeRun]:
    """One run a seed; the kinds take turns, and a third of the runs has no `gdpo/` metrics."""
    for seed in seeds:
        kind = HEALTHY[seed % len(HEALTHY)]
        rng = np.random.default_rng([1, steps, seed])
        run = _Maker(rng, steps, kind)
        columns = run.columns(plain=bool(rng.random() < 1 / 3))
        yield MadeRun(kind, steps, seed, _rows(columns, rng if kind == "restarts" else None))


def wrecked_runs(seeds: range, steps: int) -> Iterator[MadeRun]:
    """One run of each fault a seed."""
    for seed in seeds:
        for number, kind in enumerate(WRECKED):
            rng = np.random.default_rng([2, steps, seed, number])
            flat = rng.random() < 0.5
            run = _Maker(rng, steps, "flat" if flat else "learning", highest=0.62)
            columns = run.columns(plain=bool(rng.random() < 1 / 3))
            begin = int(rng.integers(max(20, steps // 4), 3 * steps // 4))
            onset = _break(kind, columns, run, begin)
            yield MadeRun(kind, steps, seed, _rows(columns), begin + 1, onset)


def overfitting_runs(seeds: range, steps: int) -> Iterator[MadeRun]:
    """Validation rises for a third of the run and falls evenly after it, while training rises."""
    for seed in seeds:
        for rows, fall in OVERFITTING.items():
            rng = np.random.default_rng([3, steps, seed, rows])
            run = _Maker(rng, steps, "learning", sizes=(rows,), validations=VALIDATIONS[steps])
            peak = steps // 3
            run.validated = run.rates[0][peak] - fall * np.clip(
                (np.arange(steps) - peak) / (steps - 1 - peak), 0, 1
            )
            run.validated[:peak] = run.rates[0][:peak]
            columns = run.columns(plain=bool(rng.random() < 1 / 3))
            yield MadeRun(
                f"a fall of {fall} on {rows} rows", steps, seed, _rows(columns), peak, peak
            )


def flat_validations(seeds: range, steps: int) -> Iterator[MadeRun]:
    """As many validations of 500 rows as in the runs that overfit, in a run that stays as it is."""
    for seed in seeds:
        rng = np.random.default_rng([4, steps, seed])
        run = _Maker(rng, steps, "flat", sizes=(500,), validations=VALIDATIONS[steps])
        yield MadeRun("flat, many validations", steps, seed, _rows(run.columns(plain=False)))


class _Maker:
    """Draws the size and the level of a run, and makes its metrics column by column."""

    def __init__(
        self,
        rng: np.random.Generator,
        steps: int,
        kind: str,
        highest: float | None = None,
        sizes: tuple[int, ...] = (50, 200, 500, 2000),
        validations: int | None = None,
    ) -> None:
        self.rng, self.steps, self.kind = rng, steps, kind
        self.groups, self.samples = int(rng.choice([32, 128, 512])), int(rng.choice([4, 8, 16]))
        self.rates = [self._rate(highest), self._rate(None)]
        self.rows = int(rng.choice(sizes))
        self.validations = validations or int(rng.choice([6, 12, VALIDATIONS[steps]]))
        self.validated = self.rates[0]
        if kind == "plateau":
            self.validated = np.minimum(self.rates[0], np.quantile(self.rates[0], 0.4))
        self.names = ("correctness", "format")

    def _uniform(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def _log_uniform(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def _noise(self, sd: float) -> Floats:
        return np.exp(self.rng.normal(0, sd, self.steps))

    def _rate(self, highest: float | None) -> Floats:
        """The true mean of a binary reward, of each step."""
        time = np.linspace(0, 1, self.steps)
        last = highest or self._uniform(0.3, 0.95)
        first = last if self.kind == "flat" else last * self._uniform(0.1, 0.8)
        if self.kind == "saturated":
            last = self._uniform(0.97, 1.0)
        if self.kind == "sparse":
            first, last = self._log_uniform(0.002, 0.02), self._uniform(0.02, 0.2)
        rise = 1 - np.exp(-time * self._uniform(2, 12))
        rate = first + (last - first) * rise / rise[-1]
        if self.kind == "curriculum":
            rate[self.steps // 2 :] *= self._uniform(0.5, 0.9)
        return np.asarray(np.clip(rate, 0, 1))

    def columns(self, plain: bool) -> Columns:
        """All metrics; `plain` is a run of verl without our metrics."""
        means = [self._means(rate, self.groups * self.samples) for rate in self.rates]
        found = {"critic/score/mean": means[0] + means[1], **self._of_verl()}
        found["critic/score/min"] = np.zeros(self.steps)
        if not plain:
            for name, rate, mean in zip(self.names, self.rates, means, strict=True):
                found |= self._of_reward(name, rate, mean)
            found |= self._of_batch(found)
            if self.kind == "sources":
                found |= self._of_sources()
        return found | self._of_validation("reward" if plain else "correctness")

    def _means(self, rate: Floats, samples: int) -> Floats:
        """Samples of a group resemble each other: up to 1.3 times the noise of a binomial."""
        wider = self._uniform(1.0, 1.3)
        noise = self.rng.binomial(samples, rate) / samples - rate
        return np.clip(rate + wider * noise, 0, 1)

    def _of_verl(self) -> Columns:
        time = np.linspace(0, 1, self.steps)
        ends = {"lengthening": 0.05, "saturated": 0.05}.get(self.kind, 0.15)
        entropy = self._log_uniform(0.05, 1.5) * self._uniform(ends, 1.2) ** time
        gradient = self._log_uniform(0.02, 5) * self._log_uniform(0.2, 5) ** time
        far = self._log_uniform(0.001, 0.5) * (1 - np.exp(-time * self._uniform(1, 20)))
        per_update = 0.0 if self.rng.random() < 0.3 else self._log_uniform(1e-5, 3e-3)
        grown = self._uniform(1.5, 4) if self.kind == "saturated" else self._uniform(0.8, 1.5)
        length = self._log_uniform(25, 4000)
        longer = self._uniform(2, 5) if self.kind == "lengthening" else self._uniform(0.8, 1.2)
        cut = self.rng.beta(2, self._uniform(6, 100), self.steps)
        found = {
            "actor/entropy": entropy * self._noise(0.10),
            "actor/grad_norm": gradient * self._noise(0.30),
            "actor/ppo_kl": per_update * self.rng.normal(0.3, 1, self.steps),
            "actor/pg_clipfrac": self._log_uniform(1e-5, 2e-2) * self._noise(0.5),
            "critic/advantages/max": self._uniform(1.5, 4) * grown**time * self._noise(0.24),
            "critic/advantages/min": -self._uniform(1.5, 4) * grown**time * self._noise(0.24),
            "response_length/mean": length * longer**time * self._noise(0.06),
            "response_length/clip_ratio": cut,
            "response/aborted_ratio": self.rng.binomial(256, 0.001, self.steps) / 256,
            "actor/kl_loss": far * self._noise(0.25),
        }
        if self.rng.random() < 0.4:
            del found["actor/kl_loss"]
        if self.kind == "spikes":
            self._spikes(found)
        return found

    def _spikes(self, columns: Columns) -> None:
        for name in ("actor/grad_norm", "actor/ppo_kl", "actor/kl_loss", "critic/advantages/max"):
            if name in columns:
                at = self.rng.random(self.steps) < 0.02
                columns[name][at] *= self._log_uniform(5, 200)
        columns["actor/entropy"][self.rng.random(self.steps) < 0.01] *= 0.1
        columns["actor/grad_norm"][self.rng.random(self.steps) < 0.002] = np.nan

    def _of_reward(self, name: str, rate: Floats, mean: Floats) -> Columns:
        """What our metrics say of a reward: prompts have rates of a beta distribution."""
        spread = self._log_uniform(0.5, 8)  # small: each prompt is solved always or never
        a, b = rate * spread + 1e-9, (1 - rate) * spread + 1e-9
        n, groups = self.samples, self.groups
        high = (
            self.rng.binomial(groups, np.exp(betaln(a + n, b) - betaln(a, b)).clip(0, 1)) / groups
        )
        low = self.rng.binomial(groups, np.exp(betaln(a, b + n) - betaln(a, b)).clip(0, 1)) / groups
        varies = np.clip(1 - high - low, 0, 1)
        low = 1 - varies - high
        found = {
            "mean": mean,
            "min": np.where(mean < 1, 0.0, 1.0),
            "max": np.where(mean > 0, 1.0, 0.0),
            "varies": varies,
            "groups_all_high": high,
            "groups_all_low": low,
        }
        if self.rng.random() < 0.7:  # it declares its bounds
            found |= {"at_low": 1 - mean, "at_high": mean}
        return {f"gdpo/{name}/{what}": values for what, values in found.items()}

    def _of_batch(self, found: Columns) -> Columns:
        varies = [found[f"gdpo/{name}/varies"] for name in self.names]
        ends = np.linspace(1, 0, self.steps) if self.kind == "weight schedule" else 1.0
        weighted = np.array([varies[0], varies[1] * ends]) + 1e-12
        energy = weighted / weighted.sum(0)
        few = np.sqrt(np.maximum(self.groups * np.maximum(*varies), 1))  # noise of correlations
        opposed = (
            self._uniform(-0.4, -0.2) if self.kind == "trade-off" else self._uniform(-0.1, 0.5)
        )
        silent = (1 - varies[0]) * (1 - varies[1])
        follows = (
            self._uniform(0.1, 0.5) if self.kind == "lengthening" else self._uniform(-0.2, 0.2)
        )

        def scatter(mean: Floats | float) -> Floats:
            return np.asarray(np.clip(mean + self.rng.normal(0, 1, self.steps) / few, -1, 1))

        result = {
            "gdpo/format/correlation_with_correctness": scatter(opposed),
            "gdpo/length_correlation": scatter(follows),
            "gdpo/no_signal": self.rng.binomial(self.groups, silent) / self.groups,
            "gdpo/batch_norm_std": np.sqrt(weighted.sum(0) + 1e-3) * self._noise(0.08),
        }
        for name, share in zip(self.names, energy, strict=True):
            low = found[f"gdpo/{name}/groups_all_low"]
            result[f"gdpo/{name}/energy"] = share
            result[f"gdpo/{name}/correlation"] = scatter(np.sqrt(share) + 0.5 * opposed)
            result[f"gdpo/{name}/update_all_low"] = np.clip(
                low * (1 - share) * self._noise(0.2), 0, 1
            )
        return result

    def _of_sources(self) -> Columns:
        """Of two to five data sources, each with its own level, some with few samples."""
        found = {}
        for source in "abcde"[: int(self.rng.integers(2, 6))]:
            samples = int(self.groups * self.samples * self._uniform(0.03, 0.5)) or 1
            for name, rate in zip(self.names, self.rates, strict=True):
                own = np.clip(rate * self._uniform(0.5, 1.0), 0, 1)
                found[f"gdpo/{name}/mean/{source}"] = self._means(own, samples)
        return found

    def _of_validation(self, name: str) -> Columns:
        """Validation scores the same rows each time, so a part of its noise stays the same."""
        sources = "abcde"[: int(self.rng.integers(2, 6))] if self.kind == "sources" else ("made",)
        every = max(1, self.steps // self.validations)
        measured = (np.arange(1, self.steps + 1) % every == 0) | (np.arange(self.steps) == 0)
        found = {}
        for source in sources:
            changes = self._uniform(0.5, 1.0)  # the part of the variance that is new each time
            level = np.clip(self.validated * self._uniform(0.8, 1.0), 0.001, 0.999)
            sd = np.sqrt(level * (1 - level) / self.rows)
            once = self.rng.normal(0, np.sqrt(1 - changes))
            each = self.rng.normal(0, np.sqrt(changes), self.steps)
            values = np.round(np.clip(level + sd * (once + each), 0, 1) * self.rows) / self.rows
            key = f"val-{'core' if name == 'reward' else 'aux'}/{source}/{name}/mean@1"
            found[key] = np.where(measured, values, ABSENT)
        return found


def _break(kind: str, columns: Columns, run: _Maker, begin: int) -> int:
    """Put one fault into the metrics from the step `begin` on; return when it is there."""
    after = np.arange(run.steps) >= begin
    if kind == "reward is NaN for 30 steps":
        for name in [name for name in columns if name.endswith("/mean") and "length" not in name]:
            columns[name][begin : begin + 30] = np.nan
    elif kind == "gradient is NaN":
        columns["actor/grad_norm"][after] = np.nan
    elif kind == "gradient norm 22,000":
        columns["actor/grad_norm"][after] = (22_000 * run._noise(0.3))[after]
    elif kind == "entropy 1e-4":
        columns["actor/entropy"] += 0.02
        columns["actor/entropy"][after] = (1e-4 * run._noise(0.3))[after]
    elif kind.startswith("KL"):
        name = "actor/kl_loss" if "reference" in kind else "actor/ppo_kl"
        columns[name] = np.where(after, 0.4, 0.001) * run._noise(0.25)
    elif kind == "|A| grows e^10":
        growth = np.exp(
            10 * np.clip((np.arange(run.steps) - begin) / (run.steps - 1 - begin), 0, 1)
        )
        for end in ("min", "max"):
            columns[f"critic/advantages/{end}"] *= growth
        return int(np.argmax(growth >= 100)) + 1
    else:
        return _collapse(columns, run, begin, slowly=kind.endswith("slowly"))
    return begin + 1


def _collapse(columns: Columns, run: _Maker, begin: int, slowly: bool) -> int:
    """Correctness falls to .016, in 3 steps or in a fifth of the run; in plain verl both do."""
    wait = run.steps // 5 if slowly else 3
    falls = np.clip((np.arange(run.steps) - begin) / wait, 0, 1)
    plain = not any(name.startswith("gdpo/") for name in columns)
    for number, name in enumerate(run.names[: 2 if plain else 1]):
        rate = run.rates[number] * (1 - falls) + 0.016 * falls
        run.rates[number] = rate
        if not plain:
            mean = run._means(rate, run.groups * run.samples)
            columns |= run._of_reward(name, rate, mean)
    total = [run._means(rate, run.groups * run.samples) for rate in run.rates]
    columns["critic/score/mean"] = total[0] + total[1]
    return begin + wait + 1


def _rows(
    columns: Columns, restarts: np.random.Generator | None = None
) -> list[tuple[int, dict[str, float]]]:
    names = list(columns)
    rows = [
        (step, {name: value for name, value in zip(names, values, strict=True) if value != ABSENT})
        for step, values in enumerate(np.column_stack(list(columns.values())).tolist(), start=1)
    ]
    if restarts is None:
        return rows
    for _ in range(int(restarts.integers(1, 4))):  # go back to a checkpoint, and repeat its steps
        last = int(restarts.integers(len(rows) // 2, len(rows)))
        first = max(0, last - int(restarts.integers(1, 20)))
        noise = float(np.exp(restarts.normal(0, 0.1)))
        again = [
            (step, {n: v * noise if n.startswith("actor/") else v for n, v in values.items()})
            for step, values in rows[first:last]
        ]
        rows = [*rows[:last], *again, *rows[last:]]
    del rows[len(rows) // 3]  # a line that could not be read
    return rows
