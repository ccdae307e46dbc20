"""Are rollout log-probs those of the policy that is trained?

On each layout the tiny Qwen2 generates, and the log-prob of every sampled token, as the rollout reports it from its
decoding with a key-value cache, is compared with that of a training pass over packs of whole sequences, on the same
weights: before the first training step and again after each one. Temperature 0.9. Rows in bf16 are for information.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import finish, make_model, make_parser, make_prompts, make_trainer, no_nan, on_layouts, print_table

from megarl.batch import TrainPack, balance, build_packs, count_globally
from megarl.trainer import PolicyTrainer
from parallel.log_probs import score_tokens
from parallel.mesh import Mesh
from parallel.model import QwenModel
from parallel.schedule import forward

BAR = 1e-5
MAX_TOKENS_PER_PACK = 192
DTYPES = ("fp32", "bf16")


def measure(mesh: Mesh, folder: Path, seed: int, num_steps: int) -> dict[str, list[torch.Tensor]]:
    """Return the differences of this rank's tokens, `[N]` for each measurement, by dtype; runs on every rank."""
    gaps: dict[str, list[torch.Tensor]] = {}
    for dtype in DTYPES:
        trainer = make_trainer(
            mesh, folder / "qwen2", folder / "prompts.jsonl", MAX_TOKENS_PER_PACK, dtype=dtype, seed=seed
        )
        gaps[dtype] = [generate_and_score(trainer)]
        for _ in range(num_steps):
            trainer.step()
            gaps[dtype].append(generate_and_score(trainer))
    return gaps


def generate_and_score(trainer: PolicyTrainer) -> torch.Tensor:
    """Return |rollout log-prob - training log-prob| `[N]` of this rank's share of a new rollout; on ranks that are not
    the last stage of their pipeline, an empty tensor."""
    mesh, run, rollout = trainer.mesh, trainer.config.run, trainer.config.rollout
    prompts = trainer.prompts.take(trainer.state.num_prompts_used, rollout.prompts_per_step, run.seed)
    groups = trainer.responder.respond(prompts, rollout.group_size, trainer.sampling)
    samples = [sample for group in groups for sample in group]
    mine = [
        samples[index] for index in balance([sample.num_tokens for sample in samples], mesh.data_size)[mesh.data_rank]
    ]
    aggregation = trainer.config.recipe.aggregation
    packs = build_packs(mine, run.max_tokens_per_pack, aggregation, count_globally(mine, mesh), mesh)

    def gap(model: QwenModel, hidden: torch.Tensor, pack: TrainPack) -> torch.Tensor:
        log_probs, _ = score_tokens(model, hidden, pack, rollout.temperature)
        return (log_probs - pack.old_log_probs).abs()

    return torch.cat([torch.empty(0), *forward(trainer.policy.chunks, packs, gap)])


def summarize(name: str, dtype: str, ranks: Sequence[dict[str, list[torch.Tensor]]]) -> dict[str, Any]:
    """Return a row of numbers, over the log-probs of every rank (tensor ranks compute the same ones)."""
    gaps = torch.cat([gap for rank in ranks for gap in rank[dtype]]).double()
    largest, mean = no_nan(float(gaps.max())), no_nan(float(gaps.mean()))
    return {"layout": name, "dtype": dtype, "log_probs": len(gaps), "largest": largest, "mean": mean}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-steps", type=int, default=3, metavar="N", help="training steps (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "qwen2", args.seed)
        make_prompts(folder / "prompts.jsonl", args.seed, count=64)
        found = on_layouts(measure, args.layouts, folder, folder, args.seed, args.num_steps)
    rows = [summarize(layout, dtype, ranks) for layout, ranks in found.items() for dtype in DTYPES]
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    worst = max(row["largest"] for row in rows if row["dtype"] == "fp32")
    mean = max(row["mean"] for row in rows if row["dtype"] == "fp32")
    figure = (
        f"|rollout log-prob - training log-prob| in fp32: {worst:.1e} at most (bar {BAR:.0e}), {mean:.1e} in the mean"
    )
    finish(figure, worst <= BAR, {"bar": BAR, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
