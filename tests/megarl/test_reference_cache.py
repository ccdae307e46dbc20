"""Log-probs of the reference on disk: found again for the same model and data alone, and never believed if broken."""

import logging
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from megarl.batch import Sample
from megarl.reference_cache import ReferenceCache, cache_key

LENGTHS = [3, 1]
LOG_PROBS = torch.tensor([-1.0, -2.0, -3.0, -4.0])


def samples() -> list[Sample]:
    return [Sample(i, 0, (1, 2), (5,) * n, torch.zeros(n), score=0.0, truncated=False) for i, n in enumerate(LENGTHS)]


@pytest.fixture
def cache(tmp_path):
    return ReferenceCache(tmp_path / "key.safetensors", LENGTHS)


def test_what_was_written_is_read_back_and_nothing_else_is_left(cache):
    assert cache.read() is None
    cache.write(LOG_PROBS)
    assert torch.equal(cache.read(), LOG_PROBS)
    cache.write(LOG_PROBS + 1)
    assert torch.equal(cache.read(), LOG_PROBS + 1)
    assert [path.name for path in cache.path.parent.iterdir()] == ["key.safetensors"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def without_checksum(path):
    save_file({"log_probs": LOG_PROBS, "lengths": torch.tensor(LENGTHS)}, path)


def of_other_lengths(path):
    ReferenceCache(path, [1, 3]).write(LOG_PROBS)


def with_other_names(path):
    save_file({"values": LOG_PROBS}, path)


@pytest.mark.parametrize("spoil", [cut, flip_a_bit, without_checksum, of_other_lengths, with_other_names])
def test_a_broken_or_foreign_file_is_not_used_and_is_replaced(cache, caplog, spoil):
    cache.write(LOG_PROBS)
    spoil(cache.path)
    with caplog.at_level(logging.WARNING):
        assert cache.read() is None
    assert "key.safetensors: the reference's log-probs are computed again: " in caplog.text
    cache.write(LOG_PROBS)
    assert torch.equal(cache.read(), LOG_PROBS)


def test_a_folder_that_is_gone_costs_the_cache_and_not_the_run(tmp_path, caplog):
    cache = ReferenceCache(tmp_path / "gone" / "key.safetensors", LENGTHS)
    cache.write(LOG_PROBS)
    assert "the reference's log-probs were not kept" in caplog.text
    assert cache.read() is None


def test_what_ranks_send_each_other_is_no_larger_than_the_log_probs(cache):
    cache = replace(cache, lengths=[1] * 1000)
    cache.write(torch.zeros(1000))
    assert len(pickle.dumps(cache.read())) < 2 * 4 * 1000


def test_the_key_depends_on_model_dtype_and_every_token(small_run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(small_run.folder / "model", model)
    key = cache_key(model, "fp32", samples())
    assert key == cache_key(small_run.folder / "model", "fp32", samples())  # not on where the folder is
    keys = {key, cache_key(model, "bf16", samples()), cache_key(model, "fp32", samples()[::-1])}
    first, second = samples()
    keys.add(cache_key(model, "fp32", [first, replace(second, response=(6,))]))
    keys.add(cache_key(model, "fp32", [replace(first, prompt=(1, 2, 5), response=(5, 5)), second]))
    for position in (100, 400_000, -1):
        spoiled = bytearray((small_run.folder / "model" / "model.safetensors").read_bytes())
        spoiled[position] ^= 1
        (model / "model.safetensors").write_bytes(spoiled)
        keys.add(cache_key(model, "fp32", samples()))
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    keys.add(cache_key(model, "fp32", samples()))
    assert len(keys) == 9


def test_training_changes_the_key_of_a_file_larger_than_what_is_read_of_it(tmp_path):
    """A matrix of 8 MiB behind 2 MiB that stay as they are, as an embedding of unseen tokens does."""
    (tmp_path / "config.json").write_text("{}")
    weights = {"a_frozen": torch.zeros(2**19), "b_trained": torch.zeros(2**21)}
    save_file(weights, tmp_path / "model.safetensors")
    before = cache_key(tmp_path, "fp32", [])
    save_file({**weights, "b_trained": weights["b_trained"] + 1e-3}, tmp_path / "model.safetensors")
    assert cache_key(tmp_path, "fp32", []) != before
