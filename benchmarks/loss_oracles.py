"""Do losses, advantages and aggregations compute what the papers say, and what TRL computes?

    python benchmarks/loss_oracles.py

Every loss, advantage and aggregation of megarl is compared, in value and gradient,
  - with its paper's formula in NumPy float64 (`oracles_numpy.py`: loops over tokens, derivatives by the complex step),
    on random batches of uneven responses: one of a single token, one masked as a whole, ratios from e^-19 to e^19;
  - with TRL, where it defines the same: its trainers compute their own losses (`oracles_trl*.py`) with a tiny random
    Qwen2 in float64. TRL comes with the `dev` extra; without it only the first part runs, and the last line says so.
Columns: the largest difference of values and of gradients, relative to each number, or to 1 (or the largest number, if
that is less than 1) where it is smaller; for gradients of a model, relative to the largest. What TRL defines in another
way is listed below with the reason, not judged.
megarl hands out advantages and weights in fp32: 6e-8 of a number is its rounding.
"""

import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import argparse
import importlib.util
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from common import finish, make_model, print_table
from oracle_batches import Differences, Row, draw
from oracle_cases import CASES

BAR = 1e-6


def numpy_rows(num_batches: int, seed: int) -> list[Row]:
    """Compare with the papers' formulas: the largest differences over all batches."""
    generator = np.random.default_rng(seed)
    batches = [draw(generator) for _ in range(num_batches)]
    return [Row(name, "NumPy", largest([case(batch) for batch in batches])) for name, case in CASES.items()]


def largest(found: Sequence[Differences]) -> Differences:
    gradients = [one.gradient for one in found if one.gradient is not None]
    values = [one.value for one in found if one.value is not None]
    return Differences(max(values, default=None), max(gradients, default=None))


def trl_rows(seed: int) -> list[Row]:
    """Compare with TRL."""
    warnings.simplefilter("ignore")
    import oracles_trl
    from oracles_trl_pairs import pair_rows
    from oracles_trl_ppo import ppo_rows

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", seed)
        models = oracles_trl.load(Path(folder) / "model")
        return [row for rows in (oracles_trl.policy_rows, pair_rows, ppo_rows) for row in rows(models, seed)]


def cells(row: Row) -> list[object]:
    numbers = (row.differences.value, row.differences.gradient)
    name = f"{row.quantity}: {row.reason}" if row.reason else row.quantity
    return [name, row.reference, *("-" if number is None else number for number in numbers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10, metavar="N", help="for NumPy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of batches and models (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    if args.batches < 1:
        parser.error(f"--batches: got {args.batches}, allowed: from 1")
    torch.set_num_threads(1)
    has_trl = importlib.util.find_spec("trl") is not None
    rows = numpy_rows(args.batches, args.seed) + (trl_rows(args.seed) if has_trl else [])
    judged = [row for row in rows if not row.reason]
    header = ["quantity", "reference", "value", "gradient"]
    print_table(header, [cells(row) for row in judged])
    if has_trl:
        print("\nDefined in another way by TRL, not judged:")
        print_table(header, [cells(row) for row in rows if row.reason])
    worst = max(judged, key=lambda row: row.differences.largest)
    figure = (
        f"{len(judged)} quantities against {' and '.join(dict.fromkeys(row.reference for row in judged))}"
        f"{'' if has_trl else ' (TRL is not installed: not compared with it)'}: largest difference "
        f"{worst.differences.largest:.1e} ({worst.quantity}, {worst.reference}; bar {BAR:.0e})"
    )
    numbers = {"bar": BAR, "rows": [asdict(row) for row in rows]}
    finish(figure, worst.differences.largest <= BAR, numbers, args.json)


if __name__ == "__main__":
    main()
