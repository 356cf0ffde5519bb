"""The metrics of a made run, column by column.

The noise is that of real runs of this repository. In 79 trainings with verl's trainer
(docs/in_verls_trainer.md), the mean of 128 binary rewards scatters 1.00 to 1.05 times as much as a
binomial number. In two runs without a GPU (60 steps), the logarithms scatter by .10 (entropy), .28
(gradient norm), .22 (KL), .24 (largest advantage) and .06 (length), without correlation from step
to step.
"""

import numpy as np
import numpy.typing as npt
from scipy.special import betaln

Floats = npt.NDArray[np.float64]
Columns = dict[str, Floats]  # NaN stands for null in the log, ABSENT for a step without the metric
ABSENT = np.inf


class Maker:
    """Draws the size and the level of a run, and makes its metrics column by column."""

    def __init__(
        self,
        rng: np.random.Generator,
        steps: int,
        kind: str,
        highest: float | None = None,
    ) -> None:
        self.rng, self.steps, self.kind = rng, steps, kind
        self.groups, self.samples = int(rng.choice([32, 128, 512])), int(rng.choice([4, 8, 16]))
        self.rates = [self._rate(highest), self._rate(None)]
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
        return found

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
