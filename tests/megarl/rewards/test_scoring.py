import math
import sys
from fractions import Fraction

import numpy as np
import pytest

from megarl.rewards.rules import exact_match, sorted_digits
from megarl.rewards.scoring import load_reward, score_response


def always(value):
    return lambda prompt, response, answer: value


def first_number(prompt, response, answer):
    return float(response.split()[0] == answer)


def test_built_in_rules_load_by_name():
    assert load_reward("exact_match") is exact_match
    assert load_reward("sorted_digits") is sorted_digits


def test_rules_load_from_an_installed_module():
    assert load_reward("megarl.rewards.rules:exact_match") is exact_match


def test_rules_load_from_a_file_and_see_its_other_functions(tmp_path):
    file = tmp_path / "my_rules.py"
    file.write_text("def half():\n    return 0.5\n\ndef rule(prompt, response, answer):\n    return half()\n")
    assert load_reward(f"{file}:rule")("p", "r", "a") == 0.5


def test_a_rule_of_a_file_named_like_a_module_doesnt_take_its_place(tmp_path):
    file = tmp_path / "fractions.py"
    file.write_text("def rule(prompt, response, answer):\n    return 2.0\n")
    assert load_reward(f"{file}:rule")("p", "r", "a") == 2.0
    assert sys.modules["fractions"].Fraction is Fraction


def test_a_rule_that_ends_the_process_is_an_error(tmp_path):
    """Status 0 without a model would look like success."""
    file = tmp_path / "ends.py"
    file.write_text("import sys\n\ndef rule(prompt, response, answer):\n    sys.exit(0)\n")
    with pytest.raises(RuntimeError, match=r"the reward failed on a response to prompt 3: SystemExit\(0\)"):
        score_response(load_reward(f"{file}:rule"), 3, "p", "r", "a")
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"cannot be loaded: SystemExit\(0\)"):
        load_reward(f"{file}:rule")


def test_unknown_rules_are_refused_with_what_is_allowed(tmp_path):
    file = tmp_path / "rules.py"
    file.write_text("LIMIT = 3\n\ndef two_arguments(prompt, response):\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"'best'; allowed: exact_match, sorted_digits, module:function or file\.py:f"):
        load_reward("best")
    with pytest.raises(ValueError, match="there is no module 'no_such_module'"):
        load_reward("no_such_module:rule")
    with pytest.raises(ValueError, match="there is no file"):
        load_reward(f"{tmp_path}/missing.py:rule")
    with pytest.raises(ValueError, match=r"allowed functions of .*rules\.py: two_arguments"):
        load_reward(f"{file}:rule")
    with pytest.raises(ValueError, match=r"allowed functions of .*rules\.py: two_arguments"):
        load_reward(f"{file}:LIMIT")
    with pytest.raises(ValueError, match=r"too many positional.*allowed: a function of \(prompt, response, answer\)"):
        load_reward(f"{file}:two_arguments")


@pytest.mark.parametrize(
    ("value", "score"),
    [
        *[(True, 1.0), (False, 0.0), (1, 1.0), (0.0, 0.0), (-0.5, -0.5), (Fraction(1, 4), 0.25)],
        *[(np.float32(0.25), 0.25), (np.int64(2), 2.0), (np.bool_(True), 1.0)],
    ],
)
def test_numbers_of_any_type_become_floats_and_zero_stays_zero(value, score):
    """RC59"""
    result = score_response(always(value), 0, "p", "r", "a")
    assert type(result) is float
    assert result == score


@pytest.mark.parametrize(
    "value", [None, math.nan, math.inf, np.float32("nan"), "1.0", {"scores": 0.0, "rewards": 1.0}, [1.0], 1j]
)
def test_anything_but_a_finite_number_stops_with_the_prompt_id(value):
    """RC59"""
    with pytest.raises(ValueError, match=r"prompt 42 is .*allowed: a finite number"):
        score_response(always(value), 42, "p", "r", "a")


def test_each_response_has_one_score_in_its_place():
    """RC59"""
    scores = [score_response(exact_match, i, "p", response, "7") for i, response in enumerate(["7", "{", "8", "7"])]
    assert scores == [1.0, 0.0, 0.0, 1.0]


def test_an_error_inside_the_rule_names_the_prompt_and_keeps_its_cause():
    with pytest.raises(RuntimeError, match="prompt 9: IndexError") as error:
        score_response(first_number, 9, "p", "", "7")
    assert isinstance(error.value.__cause__, IndexError)


def test_a_reward_file_may_hold_dataclasses_and_a_broken_one_is_named(tmp_path):
    rules = tmp_path / "rules_with_dataclass.py"
    rules.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Weights:\n    right: float = 2.0\n\n"
        "def score(prompt, response, answer):\n    return Weights().right\n"
    )
    assert load_reward(f"{rules}:score")("", "", "") == 2.0
    rules.write_text("def score(prompt, response, answer:\n")
    with pytest.raises(ValueError, match=r"rules_with_dataclass\.py' cannot be loaded: SyntaxError"):
        load_reward(f"{rules}:score")
