"""Prompts that stand once in a pack: the same numbers as from packs that repeat them."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.aggregation import sequence_mean_token_mean
from megarl.batch import Sample, build_packs, count_globally, spread_samples
from megarl.losses import ClippedValueLoss
from megarl.passes import response_log_probs, state_values
from megarl.preference import pack_pairs
from megarl.recipes import GRPO
from megarl.updates import PolicyTokenLoss, policy_head, take_step, value_head
from parallel.launch import World
from parallel.mesh import Layout, build_mesh
from tests.megarl.small_batches import build
from tests.megarl.small_pairs import draw_units
from tests.tiny_model import assert_relatively_close, draw_sequences, hf_gradients

LAYOUTS = {
    "one process": (Layout(), 1),
    "DP2": (Layout(), 2),
    "TP2+SP": (Layout(2, sequence_parallel=True), 2),
    "PP2xVP2": (Layout(1, 2, 2), 2),
}
GROUP_LENGTHS = ([3, 3, 3], [1, 6, 2, 9], [4])
PROMPT_LENGTHS = (7, 2, 5)


def make_groups(**changes) -> list[Sample]:
    """Responses of three groups, in an order that mixes the groups."""
    samples = []
    for number, (prompt_length, lengths) in enumerate(zip(PROMPT_LENGTHS, GROUP_LENGTHS, strict=True)):
        prompt, *responses = draw_sequences([prompt_length, *lengths], seed=number)
        for index, response in enumerate(responses):
            log_probs = -torch.linspace(3.0, 4.0, len(response))
            sample = Sample(number, index, prompt.tolist(), response.tolist(), log_probs, score=0.0, truncated=False)
            samples.append(
                replace(sample, advantage=0.5 + len(samples), returns=log_probs, values=log_probs, **changes)
            )
    return samples[::2] + samples[1::2]


@dataclass(frozen=True)
class Found:
    """Numbers of each sample, metrics of a step and the gradients of policy and critic."""

    log_probs: list[Tensor]
    values: list[Tensor]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    critic_gradients: dict[str, Tensor]


def run(world: World, layout: Layout, folder: Path, target: Path, max_tokens: int, share: bool) -> Found:
    mesh = build_mesh(layout, world)
    policy, critic = build(mesh, folder), build(mesh, folder, head="scalar")
    samples = make_groups()
    log_probs = response_log_probs(policy.models, samples, max_tokens, mesh, share, temperature=0.7)
    values = state_values(critic.models, samples, max_tokens, mesh, share)
    mine = [samples[index] for index in spread_samples(samples, mesh.data_size, share)[mesh.data_rank]]
    counts = count_globally(mine, mesh)
    packs = build_packs(mine, max_tokens, sequence_mean_token_mean, counts, mesh, share)
    metrics = take_step(policy, packs, counts.num_tokens, policy_head(PolicyTokenLoss(GRPO), 0.7), 0)
    metrics |= {
        f"critic_{name}": value
        for name, value in take_step(critic, packs, counts.num_tokens, value_head(ClippedValueLoss(0.2)), 0).items()
    }
    gradients = [hf_gradients(model, target / name) for model, name in ((policy, "policy"), (critic, "critic"))]
    return Found(log_probs, values, metrics, *gradients)


@pytest.mark.parametrize("max_tokens", [16, 100], ids=["groups are split", "one pack"])
@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS.values(), ids=LAYOUTS)
def test_shared_prompts_change_nothing_but_rounding(workers, tiny_qwen, tmp_path, layout, world_size, max_tokens):
    shared = workers.run(run, world_size, layout, tiny_qwen.qwen3, tmp_path / "shared", max_tokens, True)[0]
    (apart,) = workers.run(run, 1, Layout(), tiny_qwen.qwen3, tmp_path / "apart", 100, False)
    assert [len(one) for one in shared.log_probs] == [len(sample.response) for sample in make_groups()]
    torch.testing.assert_close(shared.log_probs, apart.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(shared.values, apart.values, rtol=0, atol=1e-5)
    assert shared.metrics == pytest.approx(apart.metrics, rel=1e-4, abs=1e-6)
    assert_relatively_close(shared.gradients, apart.gradients, 1e-5)
    assert_relatively_close(shared.critic_gradients, apart.critic_gradients, 1e-5)


def pack_sizes(world: World, samples: list[Sample], max_tokens: int, share: bool) -> list[int]:
    mesh = build_mesh(Layout(), world)
    packs = build_packs(
        samples, max_tokens, sequence_mean_token_mean, count_globally(samples, mesh), mesh, share_prompts=share
    )
    return [len(pack.tokens) for pack in packs]


def test_a_shared_prompt_is_counted_once(workers):
    """Prompts of 7, 2 and 5 tokens with 9, 18 and 4 tokens of response: 45 tokens in place of 65. Under a limit of 17
    the second group is cut into two."""
    samples = make_groups()
    assert workers.run(pack_sizes, 1, samples, 100, True) == [[45]]
    assert workers.run(pack_sizes, 1, samples, 100, False) == [[3 * 7 + 9 + 4 * 2 + 18 + 5 + 4]]
    (sizes,) = workers.run(pack_sizes, 1, samples, 17, True)
    assert sum(sizes) == 47
    assert max(sizes) <= 17


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 20])
def test_every_sample_has_one_rank_and_no_rank_is_idle(num_ranks):
    samples = make_groups()
    spread = spread_samples(samples, num_ranks, share_prompts=True)
    assert sorted(index for rank in spread for index in rank) == list(range(8))
    assert sum(bool(rank) for rank in spread) == min(num_ranks, 8 if num_ranks > 7 else num_ranks)


def long_groups(num_groups: int) -> list[Sample]:
    """Groups of 8 responses of 100 tokens to prompts of 5."""
    one = Sample(0, 0, [], [1] * 100, torch.zeros(100), score=0.0, truncated=False)
    return [replace(one, prompt_id=n, sample_index=i, prompt=[n] * 5) for n in range(num_groups) for i in range(8)]


@pytest.mark.parametrize(("num_groups", "num_ranks", "whole"), [(4, 2, True), (9, 8, False)])
def test_groups_are_cut_only_where_ranks_would_wait_otherwise(num_groups, num_ranks, whole):
    """4 groups on 2 ranks stay whole; 9 on 8 ranks would leave one rank with twice the work of the others."""
    samples = long_groups(num_groups)
    spread = spread_samples(samples, num_ranks, share_prompts=True)
    homes = {(samples[index].prompt_id, rank) for rank, mine in enumerate(spread) for index in mine}
    assert (len(homes) == num_groups) == whole
    assert max(len(mine) for mine in spread) <= 1.2 * len(samples) / num_ranks


@pytest.mark.parametrize("max_tokens", [11, 100], ids=["cut", "whole"])
def test_rows_of_a_pair_keep_their_own_prompts(workers, max_tokens):
    """A row that is too long loses the start of its prompt: then the pair has two prompts, and nothing is shared."""
    unit = draw_units(max_tokens=max_tokens)[4]
    assert [len(sample.prompt) for sample in unit] == ([4, 2] if max_tokens == 11 else [4, 4])
    ((pack,),) = workers.run(pair_packs, 1, [unit])
    assert pack.tokens[pack.scored].tolist() == [*unit[0].response, *unit[1].response]
    starts = pack.cu_seqlens.tolist()
    answers = [number for number, parent in enumerate(pack.parents.tolist()) if parent != number]
    for answer, sample in zip(answers, unit, strict=True):
        parent = int(pack.parents[answer])
        assert pack.tokens[starts[parent] : starts[parent + 1]].tolist() == list(sample.prompt)


def pair_packs(world: World, units: list) -> list:
    return pack_pairs(units, 100, build_mesh(Layout(), world), share_prompts=True)[0]
