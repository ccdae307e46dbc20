import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.make_tiny_qwen import main
from megarl.data.tokenizer import load_tokenizer, stop_token_ids
from parallel.qwen import read_shape


@pytest.fixture
def write(tmp_path):
    def write(name, *flags):
        main(["--out", str(tmp_path / name), *flags])
        return tmp_path / name

    return write


def num_parameters(folder):
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


def test_default_is_the_demo_model(write):
    folder = write("default")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert (read_shape(folder).rope.rope_type, read_shape(folder).rope.theta) == ("default", 10000.0)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [config[name] for name in names] == [64, 2, 4, 2, 192]
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (320, True)
    # Embedding 320 * 64, two layers of q 64 * 65, k and v 32 * 65 each, o 64 * 64, three 64 * 192, two norms; a norm.
    assert 320 * 64 + 2 * (64 * 65 + 2 * 32 * 65 + 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64 == 119360
    assert num_parameters(folder) == 119360


def test_folder_holds_tokenizer_and_both_stop_ids(write):
    folder = write("stops")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [319, 317]
    assert stop_token_ids(load_tokenizer(folder), folder) == (317, 319)


def test_weights_are_a_function_of_the_seed(write):
    first, again, other = (
        load_file(write(name, "--seed", seed) / "model.safetensors")["model.embed_tokens.weight"]
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_qwen3_takes_a_head_size_of_its_own_and_an_output_matrix(write):
    folder = write("qwen3", "--family", "qwen3", "--head-dim", "32", "--untied", "--rope-theta", "5000")
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
    assert tensors["model.layers.0.self_attn.k_norm.weight"].shape == (32,)
    assert tensors["lm_head.weight"].shape == (320, 64)
    assert "model.layers.0.self_attn.q_proj.bias" not in tensors
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["head_dim"]) == ("qwen3", 32)
    assert read_shape(folder).rope.theta == 5000.0


def test_written_model_loads_and_generates_with_transformers(write):
    folder = write("loads", "--family", "qwen2.5", "--num-layers", "4")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 4
    output = model.generate(torch.tensor([[318, 18, 16]]), max_new_tokens=3, do_sample=False)
    assert output.shape[1] <= 6
    assert output.max() < 320


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-layers", "0"], "--num-layers is 0; allowed: 1 or more"),
        (["--kv-heads", "3"], "--kv-heads is 3; allowed: divisors of --heads = 4"),
        (["--hidden-size", "66"], "--hidden-size is 66; allowed: multiples of --heads = 4"),
        (["--hidden-size", "12"], "the head size is 3; allowed: even numbers"),
        (["--head-dim", "32"], "--head-dim is 32; allowed with qwen2: left out"),
    ],
)
def test_impossible_sizes_are_refused(write, flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        write("refused", *flags)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
