"""TRL's losses and advantages of policies beside megarl's, for `loss_oracles.py`.

TRL's own trainers are built on a tiny random Qwen2 in float64, and their loss is computed of prepared inputs; megarl's
recipes get the log-probs of the same model. Gradients are those of all its parameters.
Shapes: B responses padded to T tokens, N tokens of them in all; S tokens of prompt and response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from datasets import Dataset
from oracle_batches import Differences, Row, difference, slope_difference
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from examples.train_cispo import CISPO, CISPOLoss
from megarl.advantages import GroupAdvantages, LeaveOneOut
from megarl.aggregation import GlobalCounts, weighted_sum
from megarl.batch import TrainPack
from megarl.losses import clipped
from megarl.recipes import DAPO, GRPO, GSPO, RLOO, Advantage, KLTerm, Recipe, dr_grpo
from megarl.updates import PolicyTokenLoss
from parallel.pack import pack_sequences

REFERENCE = f"TRL {trl.__version__}"
PROMPT_TEXT = "1 2"
PROMPT, LONGEST = 3, 9
"""Tokens of each prompt and of the longest response (T)."""
NUM_RESPONSES, GROUP_SIZE = 8, 4
SETTINGS: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
"""Of every TRL trainer."""

RECIPES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "GRPO": (GRPO, {"loss_type": "grpo"}),
    "GRPO with KL (k3)": (
        replace(GRPO, kl=KLTerm(0.04)),
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "GRPO with dual clip": (
        replace(GRPO, policy_loss=clipped(0.2, 0.2, dual=3.0)),
        {"loss_type": "grpo", "delta": 3.0},
    ),
    "DAPO": (DAPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "DAPO (TRL: bnpo)": (DAPO, {"loss_type": "bnpo", "epsilon_high": 0.28}),
    "DAPO with entropy bonus": (
        replace(DAPO, entropy_coefficient=0.01),
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01},
    ),
    "Dr. GRPO": (dr_grpo(LONGEST), {"loss_type": "dr_grpo"}),
    "GSPO": (
        GSPO,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "CISPO (examples/)": (
        replace(CISPO, policy_loss=CISPOLoss(low=1.0, high=4.0)),
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ),
}
"""Recipes of megarl with the settings of TRL's GRPO trainer that mean the same."""


ADVANTAGES: dict[str, tuple[str, dict[str, Any], Advantage, str]] = {
    "group advantages, none": ("grpo", {"scale_rewards": "none"}, GroupAdvantages("none"), ""),
    "leave-one-out": ("rloo", {"beta": 0.0}, LeaveOneOut(), ""),
    "group advantages, std": (
        "grpo",
        {"scale_rewards": "group"},
        GroupAdvantages("std"),
        "TRL takes the sample deviation (count less one) and adds 1e-4 to it; here it is the population's, plus 1e-6",
    ),
}
"""Kind of trainer, its settings, megarl's advantage, and the reason for a difference by definition."""

OTHERWISE: dict[str, tuple[Recipe, str, dict[str, Any], str]] = {
    "GRPO with KL, by default": (
        replace(GRPO, kl=KLTerm(0.04)),
        "grpo",
        {"loss_type": "grpo", "beta": 0.04},
        "TRL multiplies the KL by the ratio (arXiv 2512.02556), unless use_bias_correction_kl is off",
    ),
    "GRPO, a response masked": (
        GRPO,
        "grpo",
        {"loss_type": "grpo"},
        "TRL counts a response of which every token is masked in the mean over responses, with a loss of 0",
    ),
    "RLOO, later updates": (
        RLOO,
        "rloo",
        {},
        "TRL clips the ratio of whole responses, here that of each token is clipped (the first update is the same)",
    ),
}
"""Recipes, the kind of TRL's trainer and the settings that come closest, and the reason for the difference."""


@dataclass(frozen=True)
class Models:
    """What TRL's trainers are built on; the reference is the policy with noise on its weights."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    policy: PreTrainedModel
    reference: PreTrainedModel


def load(folder: Path) -> Models:
    """Load the model of a HF folder in float64; nothing is printed about it, nor by the trainers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for weights in reference.parameters():
        weights.data += 0.05 * torch.randn(weights.shape, generator=generator)
    return Models(folder, AutoTokenizer.from_pretrained(folder), policy, reference)


def compared(ours: Tensor, theirs: Tensor, model: PreTrainedModel) -> Differences:
    """Compare two losses of a model, and their gradients."""
    slopes = [torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs)]
    mine, expected = (torch.cat([slope.flatten() for slope in one]) for one in slopes)
    return Differences(difference(ours, theirs), slope_difference(mine, expected))


def score(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies `[B, S - 1]` of all tokens but the first, from tokens and mask `[B, S]`."""
    log_softmax = model(input_ids=tokens, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    log_probs = log_softmax.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)


def make_inputs(models: Models, seed: int) -> dict[str, Tensor]:
    """Return what TRL's loss of a policy needs: responses of 1 to T tokens, of which some do not count, with old
    log-probs around those of the policy, some far off."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = (NUM_RESPONSES, LONGEST)
    tokens = torch.randint(3, 300, (NUM_RESPONSES, PROMPT + LONGEST), generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (NUM_RESPONSES,), generator=generator)
    lengths[:2] = torch.tensor([1, LONGEST])
    response = (torch.arange(LONGEST) < lengths[:, None]).long()
    counts = (torch.rand(shape, generator=generator) < 0.8).long()
    counts[:, 0] = 1
    inputs = {
        "prompt_ids": tokens[:, :PROMPT],
        "prompt_mask": torch.ones(NUM_RESPONSES, PROMPT, dtype=torch.int64),
        "completion_ids": tokens[:, PROMPT:],
        "completion_mask": response,
        "tool_mask": counts,
        "advantages": normal(NUM_RESPONSES),
        "num_items_in_batch": (response * counts).sum(),
    }
    with torch.no_grad():
        old, ref = (score_responses(model, inputs)[0] for model in (models.policy, models.reference))
    far = torch.rand(shape, generator=generator) < 0.2
    old += torch.where(far, 2.0, 0.2) * normal(*shape)
    return inputs | {
        "old_per_token_logps": old,
        "old_logps": (old * response).sum(1),
        "ref_per_token_logps": ref,
    }


def score_responses(model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies `[B, T]` of responses."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    log_probs, entropy = score(model, tokens, mask)
    return log_probs[:, PROMPT - 1 :], entropy[:, PROMPT - 1 :]


def as_pack(recipe: Recipe, inputs: dict[str, Tensor]) -> TrainPack:
    """Return the responses of a batch end to end, as megarl's losses take them."""
    response = inputs["completion_mask"].bool()
    lengths, kept = response.sum(1), (inputs["completion_mask"] * inputs["tool_mask"]).sum(1)
    counts = inputs["tool_mask"][response].bool()
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    sequences = [tokens[mask] for tokens, mask in zip(inputs["completion_ids"], response, strict=True)]
    return TrainPack(
        **vars(pack_sequences(sequences, [torch.zeros(len(one), dtype=torch.bool) for one in sequences])),
        loss_weights=recipe.aggregation(kept[ids], counts, GlobalCounts(int(kept.sum()), int((kept > 0).sum()))),
        advantages=inputs["advantages"][ids],
        old_log_probs=inputs["old_per_token_logps"][response],
        ref_log_probs=inputs["ref_per_token_logps"][response],
        sequence_ids=torch.where(counts, ids, len(lengths)),
    )


def policy_loss(recipe: Recipe, inputs: dict[str, Tensor], model: PreTrainedModel) -> Tensor:
    """Return megarl's loss of a batch."""
    pack, response = as_pack(recipe, inputs), inputs["completion_mask"].bool()
    log_probs, entropy = score_responses(model, inputs)
    loss, _ = PolicyTokenLoss(recipe)(log_probs[response], entropy[response], pack)
    return weighted_sum(loss, pack.loss_weights)


Trainer = GRPOTrainer | RLOOTrainer


def build(models: Models, kind: str, settings: dict[str, Any], scores: Sequence[float] = ()) -> Trainer:
    """Build TRL's trainer of a kind, "grpo" or "rloo", whose reward function gives the scores."""
    config_class, trainer_class = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[kind]
    config = config_class(
        output_dir=str(models.folder / "trl"),
        per_device_train_batch_size=NUM_RESPONSES,
        num_generations=GROUP_SIZE,
        max_completion_length=LONGEST,
        **SETTINGS,
        **settings,
    )
    trainer = trainer_class(
        model=models.policy,
        reward_funcs=lambda completions, **_: list(scores),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT_TEXT] * NUM_RESPONSES}),
        processing_class=models.tokenizer,
    )
    trainer.model.eval()  # else the loss is divided by the number of accumulated batches
    return trainer


def recipe_row(models: Models, name: str, seed: int) -> Row:
    """Compare a recipe's loss."""
    recipe, settings = RECIPES[name]
    inputs = make_inputs(models, seed)
    theirs = build(models, "grpo", settings).compute_loss(models.policy, inputs)
    return Row(name, REFERENCE, compared(policy_loss(recipe, inputs, models.policy), theirs, models.policy))


def rloo_row(models: Models, seed: int) -> Row:
    """Compare the gradient of RLOO's first update, where all ratios are 1."""
    inputs = make_inputs(models, seed)
    inputs["tool_mask"] = torch.ones_like(inputs["tool_mask"])
    with torch.no_grad():
        inputs["old_per_token_logps"] = score_responses(models.policy, inputs)[0]
    inputs["old_logps"] = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)
    theirs = build(models, "rloo", {}).compute_loss(models.policy, inputs)
    differences = compared(policy_loss(RLOO, inputs, models.policy), theirs, models.policy)
    return Row("RLOO, first update", REFERENCE, replace(differences, value=None))


def advantage_row(models: Models, name: str, seed: int) -> Row:
    """Compare the advantages of two groups; the responses are TRL's own, the scores are given."""
    kind, settings, advantage, reason = ADVANTAGES[name]
    scores = torch.randn(NUM_RESPONSES, generator=torch.Generator().manual_seed(seed))
    trainer = build(models, kind, settings, scores.tolist())
    theirs = trainer._generate_and_score_completions([{"prompt": PROMPT_TEXT}] * NUM_RESPONSES)["advantages"]
    ours = advantage(scores, torch.arange(NUM_RESPONSES) // GROUP_SIZE)
    return Row(name, REFERENCE, Differences(difference(ours, theirs)), reason)


def otherwise_row(models: Models, name: str, seed: int) -> Row:
    """Compare what TRL defines in another way."""
    recipe, kind, settings, reason = OTHERWISE[name]
    inputs = make_inputs(models, seed)
    inputs["tool_mask"][3] = 0
    theirs = build(models, kind, settings).compute_loss(models.policy, inputs)
    return Row(name, REFERENCE, compared(policy_loss(recipe, inputs, models.policy), theirs, models.policy), reason)


def policy_rows(models: Models, seed: int) -> list[Row]:
    """Compare losses and advantages of all recipes that TRL has too."""
    return [
        *(recipe_row(models, name, seed) for name in RECIPES),
        rloo_row(models, seed),
        *(advantage_row(models, name, seed) for name in ADVANTAGES),
        *(otherwise_row(models, name, seed) for name in OTHERWISE),
    ]
