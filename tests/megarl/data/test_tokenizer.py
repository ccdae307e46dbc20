import json

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megarl.data.tokenizer import build_tiny_tokenizer, load_tokenizer, stop_token_ids

TEXTS = ["sort the digits 314256", " leading", "two  spaces", "naïve 北京", "tab\tnew\nline", "trailing ", "", "🙂 x"]


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    text = folder / "text.txt"
    text.write_text("sort the digits 314256 ascending\nnaïve 北京 12+34=46\nYou are a helpful assistant.\n" * 50)
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=330, model_type="bpe", byte_fallback=True
    )
    return folder / "tokenizer.model"


@pytest.fixture
def tiny(tiny_tokenizer_folder):
    return load_tokenizer(tiny_tokenizer_folder)


def write_json(path, content):
    path.write_text(json.dumps(content))


def test_tiny_vocabulary_has_exactly_320_tokens_and_specials_at_its_end(tiny):
    assert len(tiny) == 320
    assert sorted(tiny.get_vocab().values()) == list(range(320))
    assert tiny.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [317, 318, 319]
    assert (tiny.eos_token_id, tiny.pad_token_id, tiny.bos_token_id) == (319, 317, None)


def test_tiny_digits_are_their_bytes_counted_from_exclamation_mark(tiny):
    # "!" is id 0 and byte 33; "0" is byte 48.
    assert tiny.encode("0123456789") == list(range(15, 25))
    assert tiny.encode("314256>") == [18, 16, 19, 17, 20, 21, 29]


def test_tiny_chat_prompt_is_fifteen_tokens_with_one_token_roles(tiny):
    messages = [{"role": "user", "content": "314256>"}]
    text = tiny.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n314256><|im_end|>\n<|im_start|>assistant\n"
    ids = tiny.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    user, assistant = tiny.encode("user"), tiny.encode("assistant")
    assert len(user) == len(assistant) == len(tiny.encode("system")) == 1
    newline = 198  # the 188 printable bytes come first, then bytes 0, 1, ..., 10
    assert ids == [318, *user, newline, 18, 16, 19, 17, 20, 21, 29, 319, newline, 318, *assistant, newline]


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_tokenizer_gives_any_text_back(tiny, text):
    assert tiny.decode(tiny.encode(text)) == text


def test_tiny_tokenizer_files_are_the_same_bytes_every_time(tmp_path, tiny_tokenizer_folder):
    build_tiny_tokenizer(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny_tokenizer_folder / name).read_bytes()


def test_real_qwen_vocabulary_loads_with_published_ids(qwen_tokenizer_folder):
    tokenizer = load_tokenizer(qwen_tokenizer_folder)
    assert len(tokenizer) == 151646
    assert tokenizer.encode("Hello, world!") == [9707, 11, 1879, 0]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(specials) == [151643, 151644, 151645]
    messages = [{"role": "user", "content": "Hello, world!"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    # <|im_start|> user \n ... <|im_end|> \n <|im_start|> assistant \n
    assert ids == [151644, 872, 198, 9707, 11, 1879, 0, 151645, 198, 151644, 77091, 198]
    assert tokenizer.decode(tokenizer.encode("naïve 北京 12+34=46\n")) == "naïve 北京 12+34=46\n"


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_model_encodes_and_decodes_as_sentencepiece_does(sentencepiece_file, text):
    reference = SentencePieceProcessor(model_file=str(sentencepiece_file))
    for tokenizer in (load_tokenizer(sentencepiece_file), load_tokenizer(sentencepiece_file.parent)):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]


def test_sentencepiece_model_has_its_own_end_token_and_no_chat_template(sentencepiece_file, tmp_path):
    tokenizer = load_tokenizer(sentencepiece_file)
    assert (tokenizer.eos_token_id, tokenizer.chat_template, len(tokenizer)) == (2, None, 330)
    assert tokenizer.get_vocab()["</s>"] == 2
    assert stop_token_ids(tokenizer, tmp_path) == (2,)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="skip_special_tokens is False"):
        tokenizer.decode([5], skip_special_tokens=False)


def test_missing_tokenizer_error_names_what_is_allowed(tmp_path):
    with pytest.raises(ValueError, match=r"found: none of them.*tokenizer\.json.*sentencepiece"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_several_sentencepiece_models_are_ambiguous(tmp_path):
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"found: a\.model, b\.model.*exactly one"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_files_are_a_value_error_with_the_path(tmp_path):
    (tmp_path / "only.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"only\.model.*sentencepiece model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({"eos_token_id": [11, 12]}, (11, 12, 319)),  # RC40: all of several stop ids
        ({"eos_token_id": 317}, (317, 319)),
        ({"eos_token_id": 319}, (319,)),
        ({"eos_token_id": None}, (319,)),
        ({}, (319,)),
    ],
)
def test_stop_ids_unite_generation_config_and_tokenizer(tiny, tmp_path, generation_config, expected):
    """RC40"""
    write_json(tmp_path / "generation_config.json", generation_config)
    write_json(tmp_path / "config.json", {"eos_token_id": 5})  # not looked at beside a generation_config.json
    assert stop_token_ids(tiny, tmp_path) == expected


def test_stop_ids_hold_the_chat_end_of_a_base_model_whose_end_is_another(tiny_tokenizer_folder, tmp_path):
    for file in tiny_tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path / "tokenizer_config.json", config | {"eos_token": "<|endoftext|>"})
    write_json(tmp_path / "config.json", {"eos_token_id": 5})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == 317
    assert stop_token_ids(tokenizer, tmp_path) == (5, 317, 319)


@pytest.mark.parametrize("value", ["<|im_end|>", [11, "12"], -1, True, 1.5])
def test_stop_ids_that_are_no_ids_are_refused(tiny, tmp_path, value):
    write_json(tmp_path / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is .*allowed"):
        stop_token_ids(tiny, tmp_path)


def test_sentencepiece_gives_no_text_to_ids_that_only_the_padded_vocabulary_has(sentencepiece_file):
    tokenizer = load_tokenizer(sentencepiece_file)
    ids = tokenizer.encode("a b")
    assert tokenizer.decode([*ids, len(tokenizer), 10**6]) == tokenizer.decode(ids)
