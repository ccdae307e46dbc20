import pytest

from megarl.data.prompts import PromptExample, PromptSource, read_prompts, user_message, write_prompts
from megarl.data.tasks import SortDigits
from megarl.data.tokenizer import load_tokenizer

TASK = SortDigits(num_digits=6)


def test_example_asks_for_the_sorted_digits_in_chat_form():
    example = TASK.example(seed=0, index=5)
    digits = example.text.removesuffix(">")
    assert example.messages == ({"role": "user", "content": f"{digits}>"},)
    assert len(digits) == 6
    assert digits.isdecimal()
    assert example.answer == "".join(sorted(digits))
    assert example.prompt_id == 5


def test_example_depends_on_seed_index_and_split_alone():
    assert TASK.example(0, 3) == SortDigits().example(0, 3)
    # Pinned, so that no change gives a run with the same seed other prompts without notice.
    assert [TASK.example(0, index).text for index in range(3)] == ["162630>", "193690>", "803444>"]
    first = [TASK.example(0, index).text for index in range(50)]
    assert first != [TASK.example(1, index).text for index in range(50)]
    assert first != [TASK.example(0, index, "heldout").text for index in range(50)]


def test_train_and_heldout_strings_are_disjoint_for_any_seeds():
    task = SortDigits(num_digits=2)
    train = {task.example(seed, index).text for seed in (0, 1) for index in range(500)}
    heldout = {task.example(seed, index, "heldout").text for seed in (0, 7) for index in range(500)}
    assert not train & heldout
    assert len(train | heldout) == 100  # together all strings of two digits


def test_digits_are_spread_evenly():
    text = "".join(TASK.example(0, index).answer for index in range(1000))
    # 6,000 digits: 600 of each expected, standard deviation sqrt(6000 * 0.1 * 0.9) = 23.
    assert all(abs(text.count(digit) - 600) < 5 * 23 for digit in "0123456789")


def test_half_of_the_demonstrations_are_right_and_the_rest_shuffled_digits():
    examples = [TASK.example(0, index) for index in range(1000)]
    demonstrations = [TASK.demonstration(example, seed=0) for example in examples]
    assert all(sorted(shown) == list(row.answer) for shown, row in zip(demonstrations, examples, strict=True))
    right = sum(shown == row.answer for shown, row in zip(demonstrations, examples, strict=True))
    assert abs(right - 500) < 5 * 16  # standard deviation sqrt(1000 / 4) = 16
    assert demonstrations == [TASK.demonstration(example, seed=0) for example in examples]
    assert demonstrations != [TASK.demonstration(example, seed=1) for example in examples]


def test_right_fraction_one_shows_answers_only_and_zero_shuffles_all():
    examples = [TASK.example(0, index) for index in range(200)]
    assert [TASK.demonstration(row, 0, right_fraction=1) for row in examples] == [row.answer for row in examples]
    shuffled = [TASK.demonstration(row, 0, right_fraction=0) for row in examples]
    assert sum(shown == row.answer for shown, row in zip(shuffled, examples, strict=True)) < 10
    # A shuffle that always kept or moved one place would show here: each place gets each digit of its string.
    example = next(row for row in examples if len(set(row.answer)) == 6)
    seen = [TASK.demonstration(example, seed, right_fraction=0) for seed in range(200)]
    assert all({text[place] for text in seen} == set(example.answer) for place in range(6))


def test_wrong_answers_are_the_digits_in_another_order_and_a_function_of_the_seed():
    examples = [SortDigits(2).example(0, index) for index in range(300)]  # one in ten has two equal digits
    wrong = [SortDigits(2).wrong_answer(example, seed=0) for example in examples]
    assert wrong == [SortDigits(2).wrong_answer(example, seed=0) for example in examples]
    assert all(given != example.answer for given, example in zip(wrong, examples, strict=True))
    mixed = [(given, row) for given, row in zip(wrong, examples, strict=True) if len(set(row.answer)) > 1]
    assert 200 < len(mixed) < 300
    assert all(sorted(given) == list(row.answer) for given, row in mixed)
    longer = [TASK.example(0, index) for index in range(50)]
    first, second = ([TASK.wrong_answer(example, seed) for example in longer] for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize(("digits", "wrong"), [("777777", "777778"), ("999999", "999990")])
def test_equal_digits_have_no_wrong_order_so_one_is_changed(digits, wrong):
    assert TASK.wrong_answer(PromptExample(0, user_message(f"{digits}>"), digits), seed=0) == wrong


def test_task_written_as_a_prompt_file_becomes_fifteen_token_prompts(tmp_path, tiny_tokenizer_folder):
    examples = [TASK.example(0, index) for index in range(20)]
    write_prompts(tmp_path / "train.jsonl", examples)
    assert read_prompts(tmp_path / "train.jsonl") == examples
    source = PromptSource(tmp_path / "train.jsonl", load_tokenizer(tiny_tokenizer_folder), max_prompt_tokens=15)
    assert len(source) == 20
    assert {len(row.tokens) for row in source.rows} == {15}


def test_senseless_settings_are_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match="num_digits is 1; allowed: 2 to 18"):
        SortDigits(num_digits=1)
    with pytest.raises(ValueError, match="split is 'test'; allowed: train, heldout"):
        TASK.example(0, 0, split="test")
    with pytest.raises(ValueError, match=r"right_fraction is 1\.5; allowed: 0 to 1"):
        TASK.demonstration(TASK.example(0, 0), seed=0, right_fraction=1.5)
