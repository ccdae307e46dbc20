"""What DPO and the reward model share: units of pairs, their mean, and the split over ranks."""

import logging
from dataclasses import replace

import pytest
import torch

from megarl.config_preferences import longest_row
from megarl.data.preferences import PreferencePair
from megarl.dpo import DPOHead
from megarl.losses import PreferenceLoss
from megarl.preference import PairData, PairTrainer, as_units, mean_over_pairs, pack_pairs
from megarl.reward_model import reward_head
from megarl.updates import take_step
from parallel.mesh import Layout, build_mesh
from tests.megarl.small_batches import build
from tests.megarl.small_pairs import LAYOUTS, draw_units, reward_config, update_on_pairs
from tests.tiny_model import Records, all_parameters, assert_relatively_close

HEADS = {
    "DPO": (DPOHead(PreferenceLoss(label_smoothing=0.1, nll=0.5)), "lm"),
    "IPO": (DPOHead(PreferenceLoss("ipo")), "lm"),
    "reward model": (reward_head, "scalar"),
}


@pytest.fixture(scope="module")
def alone(workers, tiny_qwen, tmp_path_factory):
    """For each loss, the update of one process on all pairs."""
    found = {}
    for name, (head, kind) in HEADS.items():
        folders = (tiny_qwen.qwen2, tmp_path_factory.mktemp("alone") / "gradient")
        (found[name],) = workers.run(update_on_pairs, 1, Layout(), [[0, 1, 2, 3, 4]], head, kind, folders)
    return found


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("share", [False, True], ids=["repeated prompts", "shared prompts"])
@pytest.mark.parametrize(("layout", "split"), LAYOUTS.values(), ids=LAYOUTS)
def test_loss_metrics_and_gradient_are_those_of_one_process(
    workers, tiny_qwen, tmp_path, alone, name, share, layout, split
):
    """RC13, RC35: also where a rank has few or no pairs; everything is divided by the pairs of all ranks."""
    head, kind = HEADS[name]
    expected = alone[name]
    assert expected.metrics["applied"] == 1.0
    assert expected.metrics["grad_norm"] > 0.01
    folders = (tiny_qwen.qwen2, tmp_path / "gradient")
    for rank in workers.run(update_on_pairs, 2, layout, split, head, kind, folders, share):
        assert rank.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
        assert_relatively_close(rank.gradients, expected.gradients, 1e-5)


def test_pairs_become_samples_with_their_margin_as_the_difference_of_scores():
    (unit,) = as_units([PreferencePair((1, 2), (3, 9), (4, 5, 9), margin=0.5)], 5, "keep_end")
    assert [(sample.prompt, sample.response, sample.score) for sample in unit] == [
        ((1, 2), (3, 9), 0.5),
        ((1, 2), (4, 5, 9), 0.0),
    ]


def test_pairs_that_lose_an_answer_are_dropped_counted_and_logged(caplog):
    """RC34: at most 4 tokens; the second pair is cut, the third one's prompt alone has 4."""
    pairs = [
        PreferencePair((1, 2), (3, 9), (9,)),
        PreferencePair((1, 2, 3), (9,), (5, 6, 9)),
        PreferencePair((1, 2, 3, 4), (5, 9), (6, 9)),
    ]
    with caplog.at_level(logging.INFO):
        units = as_units(pairs, 4, "keep_start")
    assert [[(sample.prompt, sample.response) for sample in unit] for unit in units] == [
        [((1, 2), (3, 9)), ((1, 2), (9,))],
        [((1, 2, 3), (9,)), ((1, 2, 3), (5,))],
    ]
    summary = "2 of 3 pairs are longer than 4 tokens and were cut (keep_start); 1 of them lost an answer"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert summary in caplog.text
    whole = as_units(pairs, 4, "keep_end")
    assert [[(sample.prompt, sample.response) for sample in unit] for unit in whole[1:]] == [
        [((1, 2, 3), (9,)), ((3,), (5, 6, 9))],
        [((3, 4), (5, 9)), ((3, 4), (6, 9))],
    ]


def test_packs_keep_pairs_together_in_order_and_know_their_scores(single_world):
    units = draw_units()
    packs, num_pairs = pack_pairs(units, 50, build_mesh(Layout(), single_world))
    assert num_pairs == 5
    assert len(packs) == 2
    found = []
    for pack in packs:
        borders = zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True)
        rows = [tuple(pack.tokens[start:end].tolist()) for start, end in borders]
        assert len(rows) == len(pack.scores)
        assert pack.loss_weights.tolist() == [1.0] * len(pack.scored)
        margins = pack.scores[0::2].tolist()
        found += list(zip(rows[0::2], rows[1::2], margins, strict=True))
    expected = [((*c.prompt, *c.response), (*r.prompt, *r.response), pytest.approx(c.score)) for c, r in units]
    assert sorted(found) == sorted(expected, key=lambda pair: pair[:2])


def test_a_step_without_any_pair_changes_nothing(workers, tiny_qwen):
    """RC13 (ii)"""
    assert workers.run(step_without_pairs, 2, tiny_qwen.qwen2) == [True, True]


def step_without_pairs(world, folder) -> bool:
    trainable = build(build_mesh(Layout(), world), folder)
    packs, num_pairs = pack_pairs([], 50, trainable.mesh)
    before = all_parameters(trainable)
    with Records("megarl.updates") as records:
        metrics = take_step(trainable, packs, num_pairs, mean_over_pairs(reward_head, num_pairs), 0)
    assert records.messages == ["optimizer step 0 skipped: its mini-batch has nothing to train on"]
    same = (torch.equal(one, other) for one, other in zip(before, all_parameters(trainable), strict=True))
    return metrics["applied"] == 0.0 and all(same)


def test_each_epoch_holds_every_pair_once(small_run, tmp_path, single_world, tiny_qwen):
    """Steps of 2 out of 5 pairs: the third one crosses into the next epoch."""
    config = reward_config(small_run, tmp_path)
    config = replace(config, data=replace(config.data, batch_size=2))
    trainable = build(build_mesh(Layout(), single_world), tiny_qwen.qwen2, "scalar")
    seen: list[float] = []

    def head(model, hidden, pack):
        seen.extend(pack.scores[0::2].tolist())
        return reward_head(model, hidden, pack)

    trainer = PairTrainer(config, trainable, PairData(draw_units(), []), head)
    for _ in range(5):
        trainer.step()
    assert len(set(seen[:4])) == 4  # the first two steps
    assert sorted(seen) == pytest.approx([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4])
    assert trainer.evaluate() == {}


def test_two_rows_of_the_longest_length_fit_into_a_pack(small_run, tmp_path):
    shape = reward_config(small_run, tmp_path).check(world_size=1)
    assert longest_row(shape, 64) == 32
    assert longest_row(shape, 4096) == shape.max_position_embeddings
