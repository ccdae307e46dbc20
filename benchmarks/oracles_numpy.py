"""Losses, advantages and aggregations as the papers write them: NumPy in float64, one token or response at a time.

`loss_oracles.py` compares megarl with these; nothing is shared with it. A response is a sequence of numbers, one for
each of its tokens. Derivatives are taken by the complex step, f'(x) = Im f(x + ih) / h, which rounds no difference
(Squire and Trapp 1998): so formulas take complex numbers too, and compare only real parts.
"""

from collections.abc import Callable, Sequence

import numpy as np

Number = float | complex
Response = Sequence[Number] | np.ndarray

STEP = 1e-100
"""Of the complex step: its square vanishes beside anything."""


def derivatives(objective: Callable[[list[np.ndarray]], Number], point: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the derivative of a real function of all responses by each of their numbers."""
    results = [np.zeros(len(response)) for response in point]
    for which, response in enumerate(point):
        for place in range(len(response)):
            moved = [np.array(values, dtype=complex) for values in point]
            moved[which][place] += 1j * STEP
            results[which][place] = complex(objective(moved)).imag / STEP
    return results


def smaller(first: Number, second: Number) -> Number:
    return first if np.real(first) < np.real(second) else second


def larger(first: Number, second: Number) -> Number:
    return second if np.real(first) < np.real(second) else first


def clip(number: Number, low: float, high: float) -> Number:
    return larger(smaller(number, high), low)


def log_sigmoid(number: Number) -> Number:
    """log(1 / (1 + e^-x)), written so that no exponential overflows."""
    if np.real(number) < 0:
        return number - np.log1p(np.exp(number))
    return -np.log1p(np.exp(-number))


def clipped_policy(
    new: Number, old: Number, advantage: float, low: float, high: float, dual: float | None = None
) -> Number:
    """Loss of one token. PPO, arXiv 1707.06347, eq. 7; dual clip: arXiv 1912.09729, eq. 5."""
    ratio = np.exp(new) / np.exp(old)
    objective = smaller(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = larger(objective, dual * advantage)
    return -objective


def clipped_sequence(new: Response, old: Response, advantage: float, low: float, high: float) -> Number:
    """Loss of one response. GSPO, arXiv 2507.18071, eq. 5 and 7."""
    likelihoods = [np.exp(after) / np.exp(before) for after, before in zip(new, old, strict=True)]
    ratio = np.prod(likelihoods) ** (1 / len(likelihoods))
    return -smaller(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def clipped_importance(new: Number, old: Number, advantage: float, low: float, high: float) -> Number:
    """Loss of one token. CISPO, arXiv 2506.13585, eq. 4 and 5: the clipped ratio is a constant for the gradient."""
    ratio = np.exp(np.real(new)) / np.exp(old)
    return -clip(ratio, 1 - low, 1 + high) * advantage * new


def kl(policy: Number, reference: Number, estimator: str) -> Number:
    """Of one sampled token. J. Schulman, http://joschu.net/blog/kl-approx.html; k3: arXiv 2402.03300, eq. 4."""
    ratio = np.exp(reference) / np.exp(policy)
    if estimator == "k1":
        return -np.log(ratio)
    return np.log(ratio) ** 2 / 2 if estimator == "k2" else ratio - np.log(ratio) - 1


def importance_weight(training: float, rollout: float, cap: float) -> float:
    """Of one token: truncated importance sampling."""
    return min(np.exp(training) / np.exp(rollout), cap)


def clipped_value(value: Number, old: float, target: float, clip_range: float | None) -> Number:
    """Loss of one token: the larger of both squared errors, halved, as in PPO's code."""
    error = (value - target) ** 2
    if clip_range is not None:
        error = larger(error, (old + clip(value - old, -clip_range, clip_range) - target) ** 2)
    return error / 2


def preference(
    chosen: Response, rejected: Response, kind: str, beta: float = 0.1, label_smoothing: float = 0.0
) -> Number:
    """Loss of one pair, from each token's log-ratio of policy to reference.

    Sigmoid: DPO, arXiv 2305.18290, eq. 7, smoothed as in its code; hinge: SLiC, arXiv 2305.10425; ipo: arXiv
    2310.12036, eq. 17, per token.
    """
    if kind == "ipo":
        return (sum(chosen) / len(chosen) - sum(rejected) / len(rejected) - 1 / (2 * beta)) ** 2
    margin = beta * sum(chosen) - beta * sum(rejected)
    if kind == "hinge":
        return larger(1 - margin, 0.0)
    return -(1 - label_smoothing) * log_sigmoid(margin) - label_smoothing * log_sigmoid(-margin)


def mean_nll(chosen: Response) -> Number:
    """Second term of RPO, arXiv 2404.19733, eq. 2, from log-probs."""
    return -sum(chosen) / len(chosen)


def bradley_terry(chosen: Number, rejected: Number, margin: float) -> Number:
    """Loss of one pair of rewards. Llama 2, arXiv 2307.09288, section 3.2.2."""
    return -log_sigmoid(chosen - rejected - margin)


def group_relative(rewards: Sequence[float], normalize: str, epsilon: float = 1e-6) -> list[float]:
    """Advantages of one group. GRPO, arXiv 2402.03300, section 4.1.2; "none": Dr. GRPO, arXiv 2503.20783."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (deviation + epsilon if normalize == "std" else 1.0) for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Advantages of one group. RLOO, arXiv 2402.14740, eq. 9."""
    others = [[other for place, other in enumerate(rewards) if place != index] for index in range(len(rewards))]
    return [reward - sum(rest) / len(rest) for reward, rest in zip(rewards, others, strict=True)]


def generalized_advantages(
    rewards: Response, values: Response, last_value: float, gamma: float, lam: float
) -> list[float]:
    """Of the tokens of one response: the average of its k-step estimators, arXiv 1506.02438, eq. 11 to 16."""
    length, states = len(rewards), [*values, last_value]

    def steps(start: int, count: int) -> float:
        gained = sum(gamma**later * rewards[start + later] for later in range(count))
        return gained + gamma**count * states[start + count] - states[start]

    return [
        (1 - lam) * sum(lam ** (count - 1) * steps(start, count) for count in range(1, length - start))
        + lam ** (length - start - 1) * steps(start, length - start)
        for start in range(length)
    ]


def rewards_to_go(rewards: Response, gamma: float) -> list[float]:
    """Discounted sum of the rewards from each token on. REINFORCE++, arXiv 2501.03262, section 3."""
    return [
        sum(gamma ** (place - start) * rewards[place] for place in range(start, len(rewards)))
        for start in range(len(rewards))
    ]


def token_rewards(score: float, length: int, kls: Response | None, coefficient: float) -> list[float]:
    """Of one response. arXiv 1909.08593, section 2, token by token; the score comes with the last one."""
    penalties = [0.0] * length if kls is None else [coefficient * kl for kl in kls]
    return [(score if place == length - 1 else 0.0) - penalty for place, penalty in enumerate(penalties)]


def whitened(tokens: Sequence[float], epsilon: float = 1e-6) -> list[float]:
    """Mean 0, standard deviation 1 over all tokens given."""
    mean = sum(tokens) / len(tokens)
    deviation = (sum((token - mean) ** 2 for token in tokens) / len(tokens)) ** 0.5
    return [(token - mean) / (deviation + epsilon) for token in tokens]


def token_mean(losses: Sequence[Response]) -> Number:
    """DAPO, arXiv 2503.14476, eq. 8. Here and below: the losses of the tokens that count, by response."""
    return sum(map(sum, losses)) / sum(map(len, losses))


def sequence_mean_token_mean(losses: Sequence[Response]) -> Number:
    """GRPO, arXiv 2402.03300, eq. 3."""
    means = [sum(response) / len(response) for response in losses if len(response)]
    return sum(means) / len(means)


def sequence_mean_token_sum(losses: Sequence[Response]) -> Number:
    """A response's log-prob is the sum over its tokens: RLOO, arXiv 2402.14740."""
    sums = [sum(response) for response in losses if len(response)]
    return sum(sums) / len(sums)


def sum_over_constant(losses: Sequence[Response], length: int) -> Number:
    """Dr. GRPO, arXiv 2503.20783: a constant in place of each response's length."""
    return sequence_mean_token_sum(losses) / length
