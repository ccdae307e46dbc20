import math

import pytest

from megarl.data.tokenizer import build_tiny_tokenizer, load_tokenizer, stop_token_ids
from rollout.sampling import SamplingParams, response_length


def mask(tokens: list[int], stop_token_ids: tuple[int, ...]) -> list[int]:
    length, _ = response_length(tokens, stop_token_ids)
    return [int(index < length) for index in range(len(tokens))]


def test_a_response_ends_with_its_first_stop_token_whichever_it_is():
    """RC40"""
    stops = (11, 12)
    sequences = [[5, 6, 12, 7, 8], [5, 11, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert [mask(tokens, stops) for tokens in sequences] == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert [response_length(tokens, stops)[1] for tokens in sequences] == ["stop", "stop", "length"]


def test_the_end_token_counts_where_padding_is_the_same_id():
    """RC40: pad = end = 0."""
    assert mask([5, 6, 0, 0, 0], (0,)) == [1, 1, 1, 0, 0]
    assert response_length([5, 6, 0, 0, 0], (0,)) == (3, "stop")
    assert response_length([], (0,)) == (0, "length")
    assert response_length([5, 6], ()) == (2, "length")


def test_stop_set_is_the_union_of_generation_config_and_tokenizer(tmp_path):
    """RC40: stop ids [11,12] of the model, end token 319 of the tokenizer."""
    build_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    stops = stop_token_ids(load_tokenizer(tmp_path), tmp_path)
    assert stops == (11, 12, 319)
    assert [response_length([5, stop, 7], stops) for stop in stops] == [(2, "stop")] * 3


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.5, r"0 \(greedy\) or above, up to 1e38"),
        ("temperature", math.nan, r"0 \(greedy\) or above, up to 1e38"),
        ("temperature", math.inf, r"0 \(greedy\) or above, up to 1e38"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.01, "above 0, at most 1"),
        ("top_p", math.nan, "above 0, at most 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("min_p", math.nan, "from 0 to 1"),
        ("repetition_penalty", 0.0, "above 0, finite"),
        ("repetition_penalty", -1.0, "above 0, finite"),
        ("repetition_penalty", math.nan, "above 0, finite"),
        ("repetition_penalty", math.inf, "above 0, finite"),
        ("top_k", -1, "integers from 0"),
        ("top_k", math.nan, "integers from 0"),
        ("top_k", 2.5, "integers from 0"),
        ("max_new_tokens", -1, "integers from 0"),
        ("max_new_tokens", math.inf, "integers from 0"),
    ],
)
def test_senseless_settings_are_refused_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"^{field}: got {value}, allowed: {allowed}$"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop_token_ids", (5, -1), "got -1, allowed: integers from 0"),
        ("stop_token_ids", (5, "6"), "got '6', allowed: integers from 0"),
        ("stop_token_ids", (5, math.nan), "got nan, allowed: integers from 0"),
        ("stop_strings", ("END", ""), r"got \('END', ''\), allowed: a tuple of strings that are not empty"),
        ("stop_strings", ("END", 7), r"got \('END', 7\), allowed: a tuple of strings that are not empty"),
        ("stop_strings", "END", "got 'END', allowed: a tuple of strings that are not empty"),
    ],
)
def test_senseless_stops_are_refused_with_what_is_allowed(field, value, message):
    with pytest.raises(ValueError, match=f"^{field}: {message}$"):
        SamplingParams(**{field: value})


def test_settings_at_their_limits_are_taken():
    params = SamplingParams(
        temperature=0.0, top_p=1.0, top_k=0, min_p=1.0, repetition_penalty=0.5, max_new_tokens=0, stop_token_ids=(0,)
    )
    assert params.score_temperature == 1.0
    assert not params.truncates, "greedy decoding has no distribution to cut"
    assert SamplingParams(stop_strings=("\n", "END")).stop_strings == ("\n", "END")


def test_training_takes_truncation_but_neither_temperature_zero_nor_a_penalty():
    """RC41"""
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.1).check_for_training()
    with pytest.raises(ValueError, match=r"^temperature: got 0, allowed in training: above 0 \(greedy"):
        SamplingParams(temperature=0.0).check_for_training()
    with pytest.raises(ValueError, match=r"^repetition_penalty: got 1.2, allowed in training: 1 \(the distribution"):
        SamplingParams(repetition_penalty=1.2).check_for_training()
