"""Is one training step the same on every layout and for every split into micro-batches?

A GRPO step of a tiny Qwen2 runs on each layout with several token budgets, and is compared with one process that holds
everything in one micro-batch:
  responses   sampled responses of which a token differs
  packs       micro-batches of the first optimizer step on the rank that has the most
  loss        difference of the loss, absolute (GRPO's advantages cancel: it is a sum near 0 of terms of order one)
  grad norm   relative difference of the gradient norm before clipping
  gradient    largest relative difference of a parameter's gradient, norm(difference) / norm(reference)
  parameters  the same of the parameters after 3 optimizer steps (AdamW, lr 1e-4; it divides each element of the
              gradient by its own size, so that the rounding errors of elements near zero move parameters, in
              proportion to the learning rate: most in key biases, whose gradients nearly cancel)
Logits of Qwen2 (tied), Qwen2.5 (untied) and Qwen3 are compared with transformers' (largest absolute difference).
Rows in bf16 are for information: they train on the responses of one process in bf16, which each layout would sample a
little differently, and their gradients are rounded to bf16 before they are compared.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from common import finish, make_model, make_parser, make_prompts, make_trainer, no_nan, on_layouts, print_table
from safetensors.torch import load_file

from megarl.batch import Sample, balance, plan_packs
from parallel.log_probs import VocabShard
from parallel.mesh import Mesh
from parallel.model import build_model
from parallel.optimizer import StepResult, Trainable
from parallel.pack import pack_sequences
from parallel.qwen import read_shape
from parallel.schedule import forward, num_passes
from parallel.weights import export_hf, import_hf

BUDGETS = {"fp32": (64, 192, 4096), "bf16": (192,)}
"""Tokens per micro-batch: one or two sequences, a few, all. 64 is the longest sequence."""
FAMILIES = {"qwen2": (), "qwen2.5": ("--untied",), "qwen3": ("--untied", "--head-dim", "32")}
LENGTHS = (7, 1, 12)
"""Of the sequences, packed into one, whose logits are compared, in tokens."""
BAR = 1e-5
LOGITS_BAR = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What a training step gave; gradients and parameters are in the folder it was told."""

    samples: list[list[Sample]]
    num_packs: int
    loss: float
    grad_norm: float

    @property
    def responses(self) -> list[list[int]]:
        return [list(sample.response) for group in self.samples for sample in group]


Outcomes = dict[tuple[str, int], tuple[Outcome, Path]]
"""By dtype and budget, with the folder that holds "gradients" and "parameters"."""


class RecordingTrainable(Trainable):
    """A `Trainable` that writes the gradients of its first step to a folder before they are clipped."""

    def __init__(self, trainable: Trainable, folder: Path):
        vars(self).update(vars(trainable))
        self.folder = folder
        self.recorded = False

    def step(self, lr: float) -> StepResult:
        if not self.recorded:
            export_gradients(self, self.folder)
            self.recorded = True
        return super().step(lr)


@torch.no_grad()
def export_gradients(trainable: Trainable, folder: Path) -> None:
    """Write all gradients as a HF folder by exporting them in the parameters' place."""
    gradients = whole_gradients(trainable)
    kept = {parameter: parameter.clone() for parameter in gradients}
    for parameter, gradient in gradients.items():
        parameter.copy_(gradient)
    export_hf(folder, trainable.models, trainable.mesh)
    for parameter, value in kept.items():
        parameter.copy_(value)


def whole_gradients(trainable: Trainable) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return the gradients of this rank's parameters. In DDP's buffers only this data rank's share of each bucket is
    summed over data ranks (reduce-scatter), so the shares are gathered."""
    mesh, gradients = trainable.mesh, {}
    for buffer in (buffer for chunk in trainable.chunks for buffer in chunk.buffers):
        whole = torch.full_like(buffer.grad_data, torch.nan)
        for bucket in buffer.buckets:
            share = bucket.grad_data.chunk(mesh.data_size)[mesh.data_rank].clone()
            whole[bucket.offset : bucket.offset + bucket.grad_data.numel()] = torch.cat(mesh.gather_over_data(share))
        for parameter, (start, end, _) in buffer.param_index_map.items():
            gradients[parameter] = whole[start:end].view_as(parameter)
    return gradients


def measure(
    mesh: Mesh, folder: Path, seed: int, reference_samples: list[list[Sample]] | None
) -> tuple[Outcomes, dict[str, float]]:
    """Run on every rank: `train` and `logits_differences`."""
    return train(mesh, folder, seed, reference_samples), logits_differences(mesh, folder)


def train(mesh: Mesh, folder: Path, seed: int, reference_samples: list[list[Sample]] | None) -> Outcomes:
    """Run a step for each dtype and budget.

    Args:
        reference_samples: what bf16 trains on; None: on its own samples.
    """
    sizes = (
        mesh.tensor_size,
        mesh.pipeline_size,
        mesh.data_size,
        mesh.layout.num_chunks,
        mesh.layout.sequence_parallel,
    )
    name, outcomes = "-".join(map(str, sizes)), {}
    for dtype, budget in ((dtype, budget) for dtype, budgets in BUDGETS.items() for budget in budgets):
        target = folder / name / f"{dtype}-{budget}"
        trainer = make_trainer(mesh, folder / "qwen2", folder / "prompts.jsonl", budget, dtype, seed)
        trainer.policy = RecordingTrainable(trainer.policy, target / "gradients")
        sampled, _ = trainer.generate_groups()
        trained = reference_samples if dtype == "bf16" and reference_samples else sampled
        mini_batches = trainer.split(trainer.assign_advantages(trained))
        first, *_ = [trainer.learn(mini_batch) for mini_batch in mini_batches]
        export_hf(target / "parameters", trainer.policy.models, mesh)
        num_packs = count_packs(mini_batches[0], budget, mesh)
        outcomes[dtype, budget] = Outcome(sampled, num_packs, first["loss"], first["grad_norm"]), target
    return outcomes


def count_packs(mini_batch: Sequence[Sample], budget: int, mesh: Mesh) -> int:
    """Return the number of micro-batches that `megarl.batch.build_packs` makes of a mini-batch."""
    lengths = [sample.num_tokens for sample in mini_batch]
    mine = [lengths[index] for index in balance(lengths, mesh.data_size)[mesh.data_rank]]
    return num_passes(len(plan_packs(mine, budget)), mesh)


@torch.no_grad()
def logits_differences(mesh: Mesh, folder: Path) -> dict[str, float]:
    """Return the largest difference from transformers' logits in this rank's part of the vocabulary, per family."""
    return {family: logits_difference(mesh, folder / family, folder / f"{family}.pt") for family in FAMILIES}


def logits_difference(mesh: Mesh, model: Path, expected: Path) -> float:
    chunks = build_model(read_shape(model), mesh, torch.float32)
    import_hf(model, chunks, mesh)
    sequences = token_sequences()
    multiple = mesh.tensor_size if mesh.layout.sequence_parallel else 1
    pack = pack_sequences(sequences, [torch.zeros(len(tokens), dtype=torch.bool) for tokens in sequences], multiple)

    def difference(chunk: Any, hidden: torch.Tensor, pack: Any) -> float:
        shard, theirs = VocabShard.of(chunk), torch.load(expected)
        ours = shard.logits(chunk.gather_sequence(hidden)[: len(theirs), 0], chunk.output_weight())
        return no_nan(float((ours - theirs[:, shard.first : shard.first + shard.num_real]).abs().max()))

    return max(forward(chunks, [pack] * num_passes(1, mesh), difference), default=0.0)


def token_sequences() -> list[torch.Tensor]:
    """Return sequences of any tokens, `[length]` each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(300, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def write_expected_logits(model: Path, target: Path) -> None:
    """Write transformers' logits of the sequences, end to end, `[sum of LENGTHS, V]`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging  # slow to import, and only this process needs it

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.save(torch.cat([theirs(tokens[None]).logits[0] for tokens in token_sequences()]), target)


def worst_tensor(found: Path, reference: Path) -> tuple[float, str]:
    """Return the largest norm(difference) / norm(reference) of the tensors in two HF folders, and its tensor's name.

    Raises:
        ValueError: the folders hold different tensors.
    """
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, reference))
    if ours.keys() != theirs.keys():
        raise ValueError(f"{found} and {reference} differ in tensors: {sorted(ours.keys() ^ theirs.keys())}")
    tiny = torch.finfo(torch.float64).tiny  # a gradient that is exactly zero must be zero everywhere
    differences = [
        (no_nan(float((ours[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=tiny))), name)
        for name, tensor in theirs.items()
    ]
    return max(differences)


def compare(ranks: list[Outcomes], reference: Outcomes) -> list[dict[str, Any]]:
    """Return a row of numbers for each dtype and budget of a layout.

    Args:
        ranks: what `train` returned on each rank.
        reference: what it returned on one process.
    """
    rows = []
    for (dtype, budget), (outcome, folder) in ranks[0].items():
        expected, expected_folder = reference[dtype, max(BUDGETS[dtype])]
        gradient, gradient_name = worst_tensor(folder / "gradients", expected_folder / "gradients")
        parameters, parameters_name = worst_tensor(folder / "parameters", expected_folder / "parameters")
        pairs = zip(outcome.responses, expected.responses, strict=True)
        rows.append(
            {
                "dtype": dtype,
                "budget_tokens": budget,
                "packs": max(rank[dtype, budget][0].num_packs for rank in ranks),
                "responses": sum(ours != theirs for ours, theirs in pairs),
                "loss": no_nan(abs(outcome.loss - expected.loss)),
                "grad_norm": no_nan(abs(outcome.grad_norm / expected.grad_norm - 1)),
                "gradient": gradient,
                "gradient_tensor": gradient_name,
                "parameters": parameters,
                "parameters_tensor": parameters_name,
            }
        )
    return rows


def run(names: Sequence[str], seed: int, folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Return the rows of all layouts, and the logits' differences by layout and family."""
    make_prompts(folder / "prompts.jsonl", seed, count=64)
    for family, flags in FAMILIES.items():
        make_model(folder / family, seed, "--family", family, *flags)
        write_expected_logits(folder / family, folder / f"{family}.pt")
    found = on_layouts(measure, ["TP1"], folder, folder, seed, None)
    reference, _ = found["TP1"][0]
    bf16_samples = reference["bf16", max(BUDGETS["bf16"])][0].samples
    found |= on_layouts(measure, [name for name in names if name != "TP1"], folder, folder, seed, bf16_samples)
    rows = [
        {"layout": name, **row}
        for name in names
        for row in compare([outcomes for outcomes, _ in found[name]], reference)
    ]
    logits = {
        name: {family: max(differences[family] for _, differences in found[name]) for family in FAMILIES}
        for name in names
    }
    return rows, logits


def run_all_algorithms(layouts: Sequence[str], seed: int, json_file: Path | None) -> NoReturn:
    """Compare the gradients of every algorithm instead, see `algorithm_invariance.py`."""
    from algorithm_invariance import BUDGETS, gradients, rows_of

    names = list(dict.fromkeys(["TP1", *layouts]))
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "qwen2", seed)
        rows = rows_of(on_layouts(gradients, names, Path(folder), Path(folder)))
    print_table(["algorithm", "layout", "gradient", "with an empty rank", "mean of per-rank means"], rows)
    worst = max(max(row[2:4]) for row in rows)
    num = len({row[0] for row in rows})
    figure = (
        f"largest relative difference of a gradient from one process, {num} algorithms, {len(names)} layouts, "
        f"{len(BUDGETS)} token budgets, fp32: {worst:.1e} (bar {BAR:.0e})"
    )
    finish(figure, worst <= BAR, {"bar": BAR, "rows": rows}, json_file)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--all-algorithms", action="store_true", help="the gradients of all algorithms on one mini-batch instead"
    )
    args = parser.parse_args()
    if args.all_algorithms:
        run_all_algorithms(args.layouts, args.seed, args.json)
    with tempfile.TemporaryDirectory() as folder:
        rows, logits = run(args.layouts, args.seed, Path(folder))
    columns = ["layout", "dtype", "budget_tokens", "packs", "responses", "loss", "grad_norm", "gradient", "parameters"]
    print_table(columns, [[row[name] for name in columns] for row in rows])
    print()
    print_table(["logits", *FAMILIES], [[name, *logits[name].values()] for name in args.layouts])
    judged = [row for row in rows if row["dtype"] == "fp32"]
    worst = {name: max(row[name] for row in judged) for name in columns[4:]}
    worst_logits = max(difference for row in logits.values() for difference in row.values())
    differences = [worst[name] for name in columns[5:]]
    figure = (
        f"largest difference from one process in fp32: {worst['responses']} responses (bar 0), "
        f"loss {worst['loss']:.1e}, gradient norm {worst['grad_norm']:.1e}, gradient {worst['gradient']:.1e}, "
        f"parameters after 3 optimizer steps {worst['parameters']:.1e} (bar {BAR:.0e}); "
        f"logits from transformers' {worst_logits:.1e} (bar {LOGITS_BAR:.0e})"
    )
    passed = worst["responses"] == 0 and max(differences) <= BAR and worst_logits <= LOGITS_BAR
    finish(figure, passed, {"bar": BAR, "logits_bar": LOGITS_BAR, "rows": rows, "logits": logits}, args.json)


if __name__ == "__main__":
    main()
