"""TRL's losses of pairs (DPO, reward model) and of supervised fine-tuning beside megarl's, for `loss_oracles.py`.

As in `oracles_trl.py`. Shapes: P pairs; S tokens of prompt and answer.
"""

from typing import Any

import torch
from datasets import Dataset
from oracle_batches import Row
from oracles_trl import PROMPT, REFERENCE, SETTINGS, Models, compared, score
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from megarl.aggregation import GlobalCounts, token_mean, weighted_sum
from megarl.losses import PreferenceLoss, bradley_terry, negative_log_likelihood, sequence_means, sequence_sums

NUM_PAIRS, LONGEST = 5, 9

PREFERENCES: dict[str, tuple[PreferenceLoss, dict[str, Any]]] = {
    "DPO sigmoid": (PreferenceLoss(), {"loss_type": ["sigmoid"]}),
    "DPO ipo": (PreferenceLoss("ipo"), {"loss_type": ["ipo"]}),
    "DPO hinge": (PreferenceLoss("hinge"), {"loss_type": ["hinge"]}),
    "DPO label smoothing (TRL: aot)": (
        PreferenceLoss(label_smoothing=0.1),
        {"loss_type": ["aot_unpaired"], "label_smoothing": 0.1},
    ),
    "DPO with nll term (TRL: + sft)": (
        PreferenceLoss(nll=0.5),
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
}
"""Losses of megarl with the settings of TRL's DPO trainer that mean the same for a pair that is alone: over several,
TRL sorts log-ratios (aot) and pools tokens (sft)."""


def make_rows(seed: int) -> dict[str, Tensor]:
    """Return prompts with answers of 1 to 9 tokens, padded on the right, `[2 P, S]`: the chosen ones, then the
    rejected ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 300, (2 * NUM_PAIRS, PROMPT + LONGEST), generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (2 * NUM_PAIRS, 1), generator=generator)
    lengths[:2, 0] = torch.tensor([1, LONGEST])
    place = torch.arange(PROMPT + LONGEST)
    return {
        "input_ids": tokens,
        "attention_mask": (place < PROMPT + lengths).long(),
        "completion_mask": ((place >= PROMPT) & (place < PROMPT + lengths)).long(),
    }


def answers(model: PreTrainedModel, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all answers' tokens end to end `[N]`, and which answer they are of `[N]`."""
    mask = rows["completion_mask"][:, 1:].bool()
    log_probs = score(model, rows["input_ids"], rows["attention_mask"])[0][mask]
    return log_probs, torch.arange(len(mask)).repeat_interleave(mask.sum(1))


def preference_loss(loss: PreferenceLoss, models: Models, rows: dict[str, Tensor]) -> Tensor:
    """Return megarl's mean loss of the pairs."""
    log_probs, ids = answers(models.policy, rows)
    with torch.no_grad():
        reference, _ = answers(models.reference, rows)
    reduce = sequence_means if loss.averages else sequence_sums
    chosen, rejected = reduce(log_probs - reference, ids).chunk(2)
    likelihoods = sequence_means(negative_log_likelihood(log_probs), ids)[: len(chosen)]
    return (loss(chosen, rejected) + loss.nll * likelihoods).mean()


def preference_row(models: Models, name: str, seed: int) -> Row:
    """Compare a loss of DPO's kind; TRL gets the pairs one at a time."""
    loss, settings = PREFERENCES[name]
    rows = make_rows(seed)
    trainer = DPOTrainer(
        model=models.policy,
        ref_model=models.reference,
        args=DPOConfig(output_dir=str(models.folder / "trl"), beta=loss.beta, **SETTINGS, **settings),
        train_dataset=Dataset.from_dict({"prompt": ["1"], "chosen": ["2"], "rejected": ["3"]}),
        processing_class=models.tokenizer,
    )
    models.policy.eval()
    pairs = [{key: value[[i, NUM_PAIRS + i]] for key, value in rows.items()} for i in range(NUM_PAIRS)]
    theirs = torch.stack([trainer.compute_loss(models.policy, pair) for pair in pairs]).mean()
    return Row(name, REFERENCE, compared(preference_loss(loss, models, rows), theirs, models.policy))


def reward_row(models: Models, seed: int) -> Row:
    """Compare the loss of a reward model, with margins."""
    torch.manual_seed(seed)  # of the head, which the folder does not hold
    model = AutoModelForSequenceClassification.from_pretrained(models.folder, num_labels=1, dtype=torch.float64)
    model.config.pad_token_id = models.tokenizer.pad_token_id
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(models.folder / "trl"), **SETTINGS),
        train_dataset=Dataset.from_dict({"chosen": ["1 2"], "rejected": ["2 1"]}),
        processing_class=models.tokenizer,
    )
    model.eval()
    rows = {name: values for name, values in make_rows(seed).items() if name != "completion_mask"}
    margins = torch.rand(NUM_PAIRS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theirs = trainer.compute_loss(model, rows | {"margin": margins})
    chosen, rejected = model(**rows).logits.squeeze(-1).chunk(2)
    return Row(
        "Bradley-Terry with margin", REFERENCE, compared(bradley_terry(chosen, rejected, margins).mean(), theirs, model)
    )


def sft_row(models: Models, seed: int) -> Row:
    """Compare the loss of supervised fine-tuning; transformers computes TRL's in fp32."""
    rows = make_rows(seed)
    trainer = SFTTrainer(
        model=models.policy,
        args=SFTConfig(output_dir=str(models.folder / "trl"), loss_type="nll", **SETTINGS),
        train_dataset=Dataset.from_dict({"text": ["1 2 3"]}),
        processing_class=models.tokenizer,
    )
    models.policy.eval()
    labels = rows["input_ids"].masked_fill(rows.pop("completion_mask") == 0, -100)
    theirs = trainer.compute_loss(models.policy, rows | {"labels": labels})
    log_probs, ids = answers(models.policy, make_rows(seed))
    every = torch.ones_like(ids, dtype=torch.bool)
    weights = token_mean(torch.bincount(ids)[ids], every, GlobalCounts(len(ids), 2 * NUM_PAIRS))
    ours = weighted_sum(negative_log_likelihood(log_probs), weights)
    return Row("SFT negative log-likelihood", REFERENCE, compared(ours, theirs, models.policy))


def pair_rows(models: Models, seed: int) -> list[Row]:
    """Compare all losses that are not of a policy's own samples."""
    return [
        *(preference_row(models, name, seed) for name in PREFERENCES),
        reward_row(models, seed),
        sft_row(models, seed),
    ]
