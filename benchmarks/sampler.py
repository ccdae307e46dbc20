"""Do sampled tokens follow the distribution they should, and is it the same tokens on two tensor ranks?

    python benchmarks/sampler.py

For each setting a million tokens are drawn by `rollout.sampling.sample`, in turn from five rows of logits (flat, the
spread of a language model, peaked, with ties, with ids masked out), on one process and with the vocabulary split over
two. The expected distribution is computed apart, in float64, by sorting. Columns:
  ids         of all rows, that top-k, top-p and min-p keep
  bins        ids, the rarest of a row pooled until 5 draws are expected
  chi-square, df, z, p
              of the counts, summed over the rows; z = (chi-square - df) / sqrt(2 df), p the chance of one as large
  outside     draws of ids that are not kept
  log-prob    largest difference between the log-prob reported of a draw and log of its expected probability
  TP2         draws that differ between one and two tensor ranks
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import finish, no_nan, on_layouts, print_table
from torch import Tensor

from parallel.log_probs import VocabShard
from parallel.mesh import Mesh
from parallel.qwen import padded_vocab_size
from rollout.random_numbers import combine
from rollout.sampling import SamplingParams, sample

SETTINGS = {
    "no truncation": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9, top-k 50": SamplingParams(top_p=0.9, top_k=50),
    "min-p 0.05": SamplingParams(min_p=0.05),
}
NUM_IDS = 1500
"""Of the vocabulary: neither of the two ranks' shares ends with a whole block of the sampler."""
BATCH = 2**12
"""Draws of one call."""
LEAST_EXPECTED = 5.0
P_BAR = 1e-4
LOG_PROB_BAR = 1e-5
LAYOUTS = ("TP1", "TP2")


def make_logits(seed: int) -> Tensor:
    """Return the rows of logits `[5, V]` fp32."""
    logits = torch.randn(5, NUM_IDS, generator=torch.Generator().manual_seed(seed))
    logits *= torch.tensor([0.3, 2.0, 6.0, 1.5, 2.0])[:, None]
    logits[3] = logits[3].round()
    logits[4, ::3] = -torch.inf
    return logits


def row_of_draws(start: int, count: int, num_rows: int) -> Tensor:
    """Return the row that each of the draws from `start` on is from."""
    return torch.arange(start, start + count) % num_rows


def draw(mesh: Mesh, seed: int, num_draws: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return tokens `[num_draws]` int32 and their log-probs under the distribution drawn from; runs on every rank."""
    logits = make_logits(seed)
    width = padded_vocab_size(NUM_IDS, mesh.tensor_size) // mesh.tensor_size
    first = mesh.tensor_rank * width
    mine = logits[:, first : first + width].contiguous()
    shard = VocabShard(first, mine.shape[1], mesh.tensor_group, mesh.tensor_size)
    found = {}
    for name, params in SETTINGS.items():
        tokens, log_probs = [], []
        for start in range(0, num_draws, BATCH):
            count = min(BATCH, num_draws - start)
            keys = combine(torch.tensor(seed), torch.arange(start, start + count))
            drawn = sample(mine, keys, params, shard, row_of_draws(start, count, len(logits)))
            tokens.append(drawn.tokens.int())
            log_probs.append(drawn.sampling_log_probs)
        found[name] = torch.cat(tokens), torch.cat(log_probs)
    return found


def expected_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution `[V]` float64 that one row's tokens should follow."""
    ordered, ids = logits.double().div(params.temperature).sort(descending=True)
    kept = ordered > -torch.inf
    if params.top_k:
        kept &= ordered >= ordered[params.top_k - 1]
    if params.top_p < 1:
        masses = ordered.masked_fill(~kept, -torch.inf).softmax(0)
        needed = masses.cumsum(0) - masses < params.top_p  # the mass before an id falls short
        kept &= ordered >= ordered[needed].min()
    if params.min_p:
        kept &= ordered >= ordered[0] + math.log(params.min_p)
    probabilities = torch.zeros_like(ordered)
    probabilities[ids] = ordered.masked_fill(~kept, -torch.inf).softmax(0)
    return probabilities


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """Return chi-square of the counts `[V]` of ids that may occur, and its number of bins."""
    possible = probabilities > 0
    expected, order = (probabilities[possible] * counts.sum()).sort()
    counts = counts[possible][order].double()
    num_pooled = int((expected < LEAST_EXPECTED).sum())
    if num_pooled and float(expected[:num_pooled].sum()) < LEAST_EXPECTED:
        num_pooled = min(num_pooled + 1, len(expected))
    if num_pooled:
        expected, counts = (
            torch.cat([values[:num_pooled].sum()[None], values[num_pooled:]]) for values in (expected, counts)
        )
    return float(((counts - expected) ** 2 / expected).sum()), len(expected)


def judge(name: str, seed: int, ranks: dict[str, list[dict[str, tuple[Tensor, Tensor]]]]) -> dict[str, Any]:
    """Return a setting's row of numbers."""
    tokens, log_probs = ranks["TP1"][0][name]
    others = [rank[name][0] for layout in LAYOUTS for rank in ranks[layout]]
    differing = max(int((tokens != other).sum()) for other in others)
    logits = make_logits(seed)
    rows = row_of_draws(0, len(tokens), len(logits))
    found, freedom, num_bins, num_ids, outside, error = 0.0, 0, 0, 0, 0, 0.0
    for row, row_logits in enumerate(logits):
        probabilities = expected_probabilities(row_logits, SETTINGS[name])
        drawn = tokens[rows == row].long()
        counts = torch.bincount(drawn, minlength=NUM_IDS)
        value, bins = chi_square(counts, probabilities)
        found, freedom, num_bins = found + value, freedom + bins - 1, num_bins + bins
        num_ids += int((probabilities > 0).sum())
        outside += int(counts[probabilities == 0].sum())
        difference = (log_probs[rows == row] - probabilities[drawn].log()).abs()
        error = max(error, no_nan(float(difference.max())))
    p_value = float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(found / 2).double()))
    return {
        "setting": name,
        "ids": num_ids,
        "bins": num_bins,
        "chi-square": found,
        "df": freedom,
        "z": (found - freedom) / math.sqrt(2 * freedom),
        "p": p_value,
        "outside": outside,
        "log-prob": error,
        "TP2": differing,
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    formats = {"chi-square": "{:.1f}", "z": "{:.2f}", "p": "{:.4f}"}
    header = list(rows[0])
    print_table(header, [[formats[k].format(row[k]) if k in formats else row[k] for k in header] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--draws", type=int, default=1_000_000, metavar="N", help="tokens of each setting (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of logits and draws (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here (default: nowhere)")
    args = parser.parse_args()
    if args.draws < 1000:
        parser.error(f"--draws: got {args.draws}, allowed: from 1000")
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_layouts(draw, LAYOUTS, Path(folder), args.seed, args.draws)
    rows = [judge(name, args.seed, ranks) for name in SETTINGS]
    print_rows(rows)
    least = min(rows, key=lambda row: row["p"])
    worst = {name: max(row[name] for row in rows) for name in ("outside", "log-prob", "TP2")}
    figure = (
        f"{args.draws:,} draws of each setting: least p {least['p']:.4f} ({least['setting']}; bar {P_BAR}), "
        f"{worst['outside']} draws outside (bar 0), log-probs off by {worst['log-prob']:.1e} (bar {LOG_PROB_BAR:.0e}), "
        f"{worst['TP2']} draws differ between TP1 and TP2 (bar 0)"
    )
    passed = least["p"] >= P_BAR and worst["log-prob"] <= LOG_PROB_BAR and worst["outside"] == worst["TP2"] == 0
    numbers = {"draws": args.draws, "p_bar": P_BAR, "log_prob_bar": LOG_PROB_BAR, "rows": rows}
    finish(figure, passed, numbers, args.json)


if __name__ == "__main__":
    main()
