"""megarl's losses, advantages and aggregations beside the papers' (`oracles_numpy`), as cases of `loss_oracles.py`.

Shapes: B responses of a batch, N tokens of them, end to end; P = B / 2 pairs of neighbours.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import oracles_numpy as papers
import torch
from oracle_batches import GROUPS, LONGEST, Batch, Case, Differences, Responses, both, difference, flat
from torch import Tensor

from examples.train_cispo import CISPOLoss
from megarl.advantages import (
    BatchAdvantages,
    GeneralizedAdvantages,
    GroupAdvantages,
    LeaveOneOut,
    TokenOutcomes,
    token_rewards,
    whiten,
)
from megarl.aggregation import (
    GlobalCounts,
    constant_divisor,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    weighted_sum,
)
from megarl.losses import (
    ClippedValueLoss,
    PreferenceLoss,
    SequenceClippedPolicyLoss,
    bradley_terry,
    clipped,
    importance_weights,
    kl_penalty,
    negative_log_likelihood,
    sequence_means,
    sequence_sums,
)
from megarl.recipes import Advantage, Aggregation, PolicyLoss


def tokenwise(formula: Callable[..., papers.Number], *columns: Responses) -> list[papers.Number]:
    """Apply a formula to each token."""
    return [formula(*numbers) for responses in zip(*columns, strict=True) for numbers in zip(*responses, strict=True)]


def repeated(batch: Batch, numbers: np.ndarray) -> Responses:
    """Give each token the number of its response."""
    return [np.full(len(response), number) for response, number in zip(batch.new, numbers, strict=True)]


def policy(loss: PolicyLoss, formula: Callable[..., papers.Number]) -> Case:
    """Case of a loss of each token; `formula(new, old, advantage)`."""

    def case(batch: Batch) -> Differences:
        advantages = repeated(batch, batch.advantages)
        return both(
            lambda new: loss(new, flat(batch.old), flat(advantages), batch.ids)[0],
            lambda new: tokenwise(formula, new, batch.old, advantages),
            batch.new,
        )

    return case


def sequence_policy(low: float, high: float) -> Case:
    """Case of the loss of each response; ratios are brought near 1, where the bounds are."""
    loss = SequenceClippedPolicyLoss(low, high)

    def case(batch: Batch) -> Differences:
        near = [old + high * (new - old) for new, old in zip(batch.new, batch.old, strict=True)]
        advantages = flat(repeated(batch, batch.advantages))
        return both(
            lambda new: sequence_means(loss(new, flat(batch.old), advantages, batch.ids)[0], batch.ids),
            lambda new: [
                papers.clipped_sequence(*numbers, low, high)
                for numbers in zip(new, batch.old, batch.advantages, strict=True)
            ],
            near,
        )

    return case


def weighted_policy(batch: Batch) -> Differences:
    """Case of the clipped loss, weighed by the ratio of training to rollout."""
    advantages = repeated(batch, batch.advantages)

    def formula(new: papers.Number, old: float, rollout: float, advantage: float) -> papers.Number:
        return papers.importance_weight(old, rollout, 2.0) * papers.clipped_policy(new, old, advantage, 0.2, 0.2)

    def ours(new: Tensor) -> Tensor:
        weights = importance_weights(flat(batch.old), flat(batch.other), cap=2.0)
        return weights * clipped()(new, flat(batch.old), flat(advantages))[0]

    return both(ours, lambda new: tokenwise(formula, new, batch.old, batch.other, advantages), batch.new)


def kl(estimator: str) -> Case:
    def case(batch: Batch) -> Differences:
        formula = partial(papers.kl, estimator=estimator)
        return both(
            lambda new: kl_penalty(new, flat(batch.other), estimator),
            lambda new: tokenwise(formula, new, batch.other),
            batch.new,
        )

    return case


def nll(batch: Batch) -> Differences:
    return both(negative_log_likelihood, lambda new: tokenwise(lambda log_prob: -log_prob, new), batch.new)


def value(clip: float | None) -> Case:
    def case(batch: Batch) -> Differences:
        old = [value + 0.3 * reward for value, reward in zip(batch.values, batch.rewards, strict=True)]
        return both(
            lambda new: ClippedValueLoss(clip)(new, flat(old), flat(batch.rewards))[0],
            lambda new: tokenwise(partial(papers.clipped_value, clip_range=clip), new, old, batch.rewards),
            batch.values,
        )

    return case


def pairs(loss: PreferenceLoss) -> Case:
    """Case of the loss of each pair of neighbours, from the log-ratios of their tokens."""
    reduce = sequence_means if loss.averages else sequence_sums

    def ours(new: Tensor, batch: Batch) -> Tensor:
        ratios = reduce(new - flat(batch.other), batch.ids)
        likelihoods = sequence_means(negative_log_likelihood(new), batch.ids)
        return loss(ratios[0::2], ratios[1::2]) + loss.nll * likelihoods[0::2]

    def paper(new: Responses, batch: Batch) -> list[papers.Number]:
        ratios = [one - other for one, other in zip(new, batch.other, strict=True)]
        return [
            papers.preference(ratios[i], ratios[i + 1], loss.kind, loss.beta, loss.label_smoothing)
            + loss.nll * papers.mean_nll(new[i])
            for i in range(0, len(new), 2)
        ]

    return lambda batch: both(partial(ours, batch=batch), partial(paper, batch=batch), batch.new)


def rewarded_pairs(batch: Batch) -> Differences:
    """Case of the Bradley-Terry loss of each pair of neighbours."""
    rewards, margins = 10.0 * batch.last_values, np.abs(batch.scores[0::2])
    return both(
        lambda scores: bradley_terry(scores[0::2], scores[1::2], torch.from_numpy(margins)),
        lambda scores: [papers.bradley_terry(scores[0][2 * i], scores[0][2 * i + 1], m) for i, m in enumerate(margins)],
        [rewards],
    )


def aggregated(aggregation: Aggregation, paper: Callable[[list[list[papers.Number]]], papers.Number]) -> Case:
    """Case of the clipped loss of a batch, of the tokens that count.

    All responses are bad ones, whose losses are positive: megarl's weights are rounded to fp32, which a sum that almost
    cancels would magnify.
    """

    def case(batch: Batch) -> Differences:
        mask, kept = flat(batch.masks), torch.tensor([int(mask.sum()) for mask in batch.masks])
        weights = aggregation(kept[batch.ids], mask, GlobalCounts(int(kept.sum()), int((kept > 0).sum())))
        advantages = repeated(batch, -np.abs(batch.advantages))

        def ours(new: Tensor) -> Tensor:
            return weighted_sum(clipped(0.2, 0.28)(new, flat(batch.old), flat(advantages))[0], weights)[None]

        def theirs(new: Responses) -> list[papers.Number]:
            columns = zip(new, batch.old, advantages, batch.masks, strict=True)
            return [
                paper(
                    [
                        [papers.clipped_policy(*one[:3], 0.2, 0.28) for one in zip(*response, strict=True) if one[3]]
                        for response in columns
                    ]
                )
            ]

        return both(ours, theirs, batch.new)

    return case


def by_group(advantage: Advantage, paper: Callable[[list[float]], list[float]]) -> Case:
    """Case of an advantage of each response, from the scores of its group."""

    def case(batch: Batch) -> Differences:
        borders = np.cumsum((0, *GROUPS))
        expected = [paper(batch.scores[a:b].tolist()) for a, b in pairwise(borders)]
        ids = torch.arange(len(GROUPS)).repeat_interleave(torch.tensor(GROUPS))
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        found = advantage(torch.from_numpy(batch.scores)[order], ids[order])
        return Differences(difference(found, np.concatenate(expected)[order.numpy()]))

    return case


def outcomes(batch: Batch) -> TokenOutcomes:
    """What token-level advantages are made of."""
    truncated, last_values = torch.from_numpy(batch.truncated), torch.from_numpy(batch.last_values)
    return TokenOutcomes(flat(batch.rewards), flat(batch.values), last_values, batch.lengths, truncated)


def generalized(advantage: GeneralizedAdvantages) -> Case:
    """Case of an advantage and a return of each token, with a critic."""

    def case(batch: Batch) -> Differences:
        after = (
            np.where(batch.truncated, batch.last_values, 0.0) if advantage.bootstrap_truncated else [0.0] * sum(GROUPS)
        )
        columns = zip(batch.rewards, batch.values, after, strict=True)
        raw = np.concatenate([papers.generalized_advantages(*one, advantage.gamma, advantage.lam) for one in columns])
        found, returns = advantage(outcomes(batch))
        expected = papers.whitened(raw) if advantage.whiten else raw
        targets = raw + flat(batch.values).numpy()
        return Differences(max(difference(found, expected), difference(returns, targets)))

    return case


def over_batch(gamma: float) -> Case:
    """Case of REINFORCE++'s advantage and return of each token."""

    def case(batch: Batch) -> Differences:
        targets = np.concatenate([papers.rewards_to_go(rewards, gamma) for rewards in batch.rewards])
        found, returns = BatchAdvantages(gamma)(outcomes(batch))
        return Differences(max(difference(found, papers.whitened(targets)), difference(returns, targets)))

    return case


def whitening(batch: Batch) -> Differences:
    """Case of whitening the tokens that count."""
    mask = flat(batch.masks)
    found = whiten(flat(batch.values), mask, lambda sums: sums)
    return Differences(difference(found[mask], papers.whitened(flat(batch.values)[mask].tolist())))


def rewarding(with_kl: bool) -> Case:
    """Case of the reward of each token."""

    def case(batch: Batch) -> Differences:
        kls = [new - other for new, other in zip(batch.new, batch.other, strict=True)]
        columns = zip(batch.scores, batch.lengths.tolist(), kls if with_kl else [None] * len(kls), strict=True)
        expected = np.concatenate([papers.token_rewards(*one, 0.05) for one in columns])
        kl = flat(kls) if with_kl else None
        return Differences(difference(token_rewards(torch.from_numpy(batch.scores), batch.lengths, kl, 0.05), expected))

    return case


CASES: dict[str, Case] = {
    "clipped policy loss": policy(clipped(0.2, 0.28), partial(papers.clipped_policy, low=0.2, high=0.28)),
    "with dual clip": policy(clipped(0.2, 0.2, 3.0), partial(papers.clipped_policy, low=0.2, high=0.2, dual=3.0)),
    "with importance weights": weighted_policy,
    "CISPO (examples/)": policy(CISPOLoss(0.8, 1.0), partial(papers.clipped_importance, low=0.8, high=1.0)),
    "sequence ratio (GSPO)": sequence_policy(3e-4, 4e-4),
    "sequence ratio, wide": sequence_policy(0.2, 0.3),
    "KL k1": kl("k1"),
    "KL k2": kl("k2"),
    "KL k3": kl("k3"),
    "SFT negative log-likelihood": nll,
    "value loss": value(None),
    "value loss, clipped": value(0.2),
    "DPO sigmoid": pairs(PreferenceLoss()),
    "DPO label smoothing": pairs(PreferenceLoss(label_smoothing=0.1)),
    "DPO ipo": pairs(PreferenceLoss("ipo")),
    "DPO hinge": pairs(PreferenceLoss("hinge")),
    "DPO with nll term": pairs(PreferenceLoss(nll=0.5)),
    "Bradley-Terry with margin": rewarded_pairs,
    "token mean": aggregated(token_mean, papers.token_mean),
    "sequence mean of token means": aggregated(sequence_mean_token_mean, papers.sequence_mean_token_mean),
    "sequence mean of token sums": aggregated(sequence_mean_token_sum, papers.sequence_mean_token_sum),
    "constant divisor": aggregated(constant_divisor(LONGEST), partial(papers.sum_over_constant, length=LONGEST)),
    "group advantages, std": by_group(GroupAdvantages("std"), partial(papers.group_relative, normalize="std")),
    "group advantages, none": by_group(GroupAdvantages("none"), partial(papers.group_relative, normalize="none")),
    "leave-one-out": by_group(LeaveOneOut(), papers.leave_one_out),
    "GAE": generalized(GeneralizedAdvantages(0.99, 0.95, whiten=False)),
    "GAE, bootstrapped": generalized(GeneralizedAdvantages(0.99, 0.95, whiten=False, bootstrap_truncated=True)),
    "GAE, whitened": generalized(GeneralizedAdvantages(1.0, 0.9, bootstrap_truncated=True)),
    "batch advantages (REINFORCE++)": over_batch(0.99),
    "whitening": whitening,
    "token rewards": rewarding(with_kl=False),
    "token rewards with KL": rewarding(with_kl=True),
}
"""By the quantity compared."""
