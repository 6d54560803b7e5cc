"""Fits the speeds of `hf_memopt.planning.cards.gpus` to the published step times.

    python -m benchmarks.published.fit FOLDER

The steps are simulated once, in some ten minutes on one core, and their operations are stored in FOLDER. Then the
shares of the data sheets' speeds are fitted, for all cards together and for each family, by least squares of the
logarithms of the times. A model on a family counts as at most three steps, and each share has a weak prior. The fit is
deterministic.

The fit is validated by fits to one half of the steps, which predict the other half, and by fits without a family, which
predict that family. Predictions go to the results file, and their summary to docs/published_measurements.md. The
printed speeds, for `gpus`, come from a fit to all steps.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.common import write_results
from benchmarks.published import times
from benchmarks.published.__main__ import PAGE, write_between
from benchmarks.published.measurements import Measurement
from benchmarks.published.work import PARTS, Array, RecordedWork, recorded, step_s
from hf_memopt.planning.cards.gpus import KernelSpeeds

# Prior means of the shares, of the seconds of a kernel and of the host; then the prior deviations, in logarithms.
_EXPECTED = KernelSpeeds(half=0.55, tf32=0.6, float32=0.75, convolution=0.4, attention=0.4, memory=0.75)
_EXPECTED_KERNEL_S, _EXPECTED_HOST_S = 2e-6, 8e-6
_SHARE, _OVERHEAD, _FAMILY, _TIME = 0.4, 0.5, 0.25, 0.12
_MOST_ROWS = 3
_ROUNDS, _DIFFERENCE, _ENOUGH = 25, 1e-3, 1e-4


class Fit(NamedTuple):
    pooled: KernelSpeeds  # of all families together
    families: dict[str, KernelSpeeds]
    kernel_s: float  # shortest time of a kernel
    host_s: float  # time of the host to start a kernel

    def step_s(self, row: Measurement, work: RecordedWork) -> float:
        """Predict the seconds of a row; a family that was not fitted has the pooled speeds."""
        return step_s(work, self.families.get(times.family(row), self.pooled), self.kernel_s, self.host_s)


def fit(rows: list[Measurement], works: dict[str, RecordedWork]) -> Fit:
    """Fit all shares to the times of some rows, by the method of Levenberg and Marquardt."""
    families = sorted({times.family(row) for row in rows})
    counts = Counter((times.family(row), row.model) for row in rows)
    of_model = np.array([counts[times.family(row), row.model] for row in rows])
    weights = np.sqrt(np.minimum(of_model, _MOST_ROWS) / of_model) / _TIME
    expected = np.log([*_EXPECTED, _EXPECTED_KERNEL_S, _EXPECTED_HOST_S, *[1.0] * len(PARTS) * len(families)])
    allowed = np.array([_SHARE] * len(PARTS) + [_OVERHEAD] * 2 + [_FAMILY] * len(PARTS) * len(families))

    def errors(values: Array, which: Array) -> Array:
        found = _unpacked(values, families)
        logs = [np.log(found.step_s(row, works[row.name]) / row.step_s) for row in np.array(rows, dtype=object)[which]]
        return weights[which] * np.array(logs)

    # A family's own shares change only its rows.
    everyone = np.ones(len(rows), dtype=bool)
    moved = [everyone] * (len(PARTS) + 2)
    moved += [np.array([times.family(row) == family for row in rows]) for family in families for _ in PARTS]

    def cost(values: Array) -> float:
        return float((errors(values, everyone) ** 2).sum() + (((values - expected) / allowed) ** 2).sum())

    values, damping = expected.copy(), 1e-2
    for _ in range(_ROUNDS):
        now, before = errors(values, everyone), cost(values)
        slopes = np.zeros((len(rows), len(values)))
        for index, which in enumerate(moved):
            step = np.zeros(len(values))
            step[index] = _DIFFERENCE
            slopes[which, index] = (errors(values + step, which) - now[which]) / _DIFFERENCE
        curvature = slopes.T @ slopes + np.diag(allowed**-2)
        gradient = slopes.T @ now + (values - expected) / allowed**2
        while cost(new := _moved(values, curvature, gradient, damping)) > before and damping < 1e6:
            damping *= 4
        values, damping = new, damping / 3
        if before - cost(values) < _ENOUGH * before:
            break
    return _unpacked(values, families)


def _moved(values: Array, curvature: Array, gradient: Array, damping: float) -> Array:
    step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
    moved: Array = values - np.clip(step, -0.5, 0.5)
    return moved


def _unpacked(values: Array, families: list[str]) -> Fit:
    num = len(PARTS)
    pooled = values[:num]
    kernel_s, host_s = np.exp(values[num : num + 2])
    own = values[num + 2 :].reshape(len(families), num)
    shares = {family: KernelSpeeds(*np.exp(pooled + own[index])) for index, family in enumerate(families)}
    return Fit(KernelSpeeds(*np.exp(pooled)), shares, float(kernel_s), float(host_s))


def unseen(rows: list[Measurement], works: dict[str, RecordedWork], groups: dict[str, Any]) -> dict[str, float]:
    """Predict each row by a fit to the rows of all other groups."""
    predicted = {}
    for group in sorted(set(groups.values())):
        without = fit([row for row in rows if groups[row.name] != group], works)
        predicted |= {row.name: without.step_s(row, works[row.name]) for row in rows if groups[row.name] == group}
    return predicted


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for simulated steps, outside of the repository")
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = times.timed()
    works = {row.name: recorded(row, folder) for row in tqdm(rows, unit="row")}
    halves = times.halves(rows)
    known = [row for row in rows if row.name in halves]
    found = fit(known, works)
    for name, speeds in [*found.families.items(), ("all", found.pooled)]:
        print(f"{name}: {', '.join(f'{share:.2f}' for share in speeds)}")
    print(f"a kernel {1e6 * found.kernel_s:.1f} us, the host {1e6 * found.host_s:.1f} us")
    by_halves = unseen(known, works, halves)
    by_family = unseen(known, works, {row.name: times.family(row) for row in known})
    for name, predicted in (("of a known family", by_halves), ("of a family left out", by_family)):
        ratios = [(row.step_s or 0) / predicted[row.name] for row in known]
        print(name + ": true / predicted {:.2f} to {:.2f}".format(*np.quantile(ratios, [0.05, 0.95])))
    for row in rows:
        by_halves.setdefault(row.name, found.step_s(row, works[row.name]))
    rounded = {name: float(f"{seconds:.4g}") for name, seconds in by_halves.items()}
    write_results({"benchmark": "published.fit", "unseen_step_s": rounded}, times.RESULTS)
    print(times.report(rounded))
    write_between(times.report(rounded), times.MARKS, PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
