import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.__main__ import main
from megarl.commands.generate import parse
from megarl.generate import Choice, Completer, load_completer, loaded
from megarl.model_folder import ModelFolder
from parallel.launch import World
from parallel.mesh import Layout, build_mesh
from rollout.engine import Engine
from tests.tiny_model import load_transformers

ROOT = Path(__file__).parents[2]
USER = [{"role": "user", "content": "hi"}]
CHAT_TOKENS = 10  # <|im_start|> user \n h i <|im_end|> \n <|im_start|> assistant \n


@pytest.fixture(scope="module")
def completer(small_run):
    with loaded(small_run.folder / "model") as found:
        yield found


@pytest.fixture(scope="module")
def endless(completer):
    """The same policy in an engine as a trainer has it, with a context of 14 tokens; no token ends a response."""
    engine = completer.engine
    return Completer(Engine(engine.models, engine.mesh, context_length=14), completer.tokenizer, ())


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def all_choices(completer, prompt, n, **sampling):
    return list(completer.stream([completer.tokenizer.encode(prompt)], n, completer.params(**sampling)))


def test_greedy_completions_are_those_of_transformers(completer, small_run):
    model = load_transformers(small_run.folder / "model")
    prompts = ["xy", "13 + 4", "q"]
    answer = completer.completions(prompts, max_tokens=12, temperature=0.0)
    num_prompt = num_drawn = 0
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        ids = torch.tensor([completer.tokenizer.encode(prompt)])
        stops = list(completer.stop_token_ids)
        new = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=stops, pad_token_id=0)[
            0, ids.shape[1] :
        ]
        ended = new[-1] in torch.tensor(stops)
        assert choice["text"] == completer.tokenizer.decode(new[:-1] if ended else new)
        assert choice["finish_reason"] == ("stop" if ended else "length")
        num_prompt, num_drawn = num_prompt + ids.numel(), num_drawn + len(new)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": num_prompt + num_drawn,
    }


def test_a_completion_has_the_fields_of_openai(completer):
    answer = completer.completions(["xy", "ab"], n=3, max_tokens=4, seed=1)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "model")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert all(set(choice) == {"index", "text", "finish_reason", "logprobs"} for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 4
    assert texts(answer)[:3] == texts(completer.completions("xy", n=3, max_tokens=4, seed=1))
    assert texts(answer)[:3] != texts(answer)[3:]


def test_a_chat_answer_has_the_fields_of_openai(completer):
    answer = completer.chat(USER, n=2, max_tokens=4, seed=1)
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    for index, choice in enumerate(answer["choices"]):
        assert set(choice) == {"index", "message", "finish_reason", "logprobs"}
        assert choice["index"] == index
        assert choice["message"]["role"] == "assistant"
        assert isinstance(choice["message"]["content"], str)
    assert answer["usage"]["prompt_tokens"] == CHAT_TOKENS


def test_a_chat_without_max_tokens_fills_the_context(endless):
    answer = endless.chat(USER, n=2, seed=1)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"] == {"prompt_tokens": CHAT_TOKENS, "completion_tokens": 8, "total_tokens": 18}


def test_a_seed_repeats_an_answer_and_without_one_each_is_another(completer):
    seeded = [texts(completer.completions("xy", n=8, max_tokens=8, seed=seed)) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    free = [texts(completer.completions("xy", n=8, max_tokens=8)) for _ in range(2)]
    assert free[0] != free[1]


def test_text_is_cut_before_the_first_stop_string(completer):
    endless = Completer(completer.engine, completer.tokenizer, ())
    sampling = {"n": 16, "max_tokens": 16, "seed": 3}
    whole = endless.completions("xy", **sampling)
    index, text = next((i, t) for i, t in enumerate(texts(whole)) if t[3:7].isascii() and len(t) > 12)
    later, earlier = text[5:7], text[3:5]
    cut = endless.completions("xy", stop=[later, earlier], **sampling)
    choice = cut["choices"][index]
    assert choice["text"] == text[: min(text.index(later), text.index(earlier))]
    assert choice["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"] == 16 * 16
    chats = [endless.chat(USER, stop=stop, **sampling)["choices"] for stop in (None, "e")]
    before, after = ([choice["message"]["content"] for choice in choices] for choices in chats)
    assert after == [text.partition("e")[0] for text in before] != before


def test_log_probs_are_those_of_the_whole_distribution_at_the_temperature(completer, small_run):
    model = load_transformers(small_run.folder / "model")
    prompt = completer.tokenizer.encode("xy")
    for choice in all_choices(completer, "xy", 3, max_tokens=6, temperature=0.5, top_k=4, seed=2):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + choice.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.5).log_softmax(-1).gather(1, torch.tensor(choice.tokens)[:, None])[:, 0]
        assert choice.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_pieces_are_the_text_of_the_tokens_that_add_to_it(completer):
    ids = completer.tokenizer.encode("aé!b")
    assert len(ids) == 5  # é is two bytes
    choice = Choice(0, 0, "aé!", "stop", ids, [-0.5, -1.0, -2.0, -3.0, -4.0])
    assert choice.pieces(completer.tokenizer) == [("a", 0, -0.5), ("é", 1, -1.0), ("!", 2, -3.0)]


def test_log_probs_in_answers_belong_to_the_pieces(completer):
    (choice,) = all_choices(completer, "xy", 1, max_tokens=8, seed=3)
    pieces = choice.pieces(completer.tokenizer)
    found = completer.completions("xy", max_tokens=8, seed=3, logprobs=0)["choices"][0]["logprobs"]
    assert pieces
    assert list(zip(found["tokens"], found["text_offset"], found["token_logprobs"], strict=True)) == pieces
    answer = completer.chat(USER, max_tokens=8, seed=3, logprobs=True)["choices"][0]
    content = answer["logprobs"]["content"]
    assert "".join(piece["token"] for piece in content) == answer["message"]["content"] != ""
    assert all(bytes(piece["bytes"]).decode() == piece["token"] and piece["logprob"] < 0 for piece in content)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": ""}, "prompt: got '', allowed: text, or a list of texts, not empty"),
        ({"prompt": []}, "prompt: got [], allowed"),
        ({"n": 0}, "n: got 0, allowed: from 1"),
        ({"max_tokens": 0}, "max_tokens: got 0, allowed: from 1"),
        ({"max_tokens": 511}, "max_tokens: got 511 after a prompt of 2 tokens, allowed: 512 together"),
        ({"temperature": -1.0}, "temperature: got -1.0, allowed: 0 (greedy) or above"),
        ({"temperature": math.nan}, "temperature: got nan, allowed: 0 (greedy) or above"),
        ({"top_p": 0.0}, "top_p: got 0.0, allowed: above 0, at most 1"),
        ({"min_p": 2.0}, "min_p: got 2.0, allowed: from 0 to 1"),
        ({"stop": [""]}, "stop_strings: got ('',), allowed"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, allowed: 64-bit integers"),
        ({"logprobs": 5}, "logprobs: got 5, allowed: None, or 0 (drawn tokens only)"),
    ],
)
def test_wrong_values_are_named(completer, wrong, message):
    with pytest.raises(ValueError) as refusal:
        completer.completions(**{"prompt": "xy", **wrong})
    assert message in str(refusal.value)


def test_wrong_chats_unknown_parameters_and_stop_strings_without_decode_are_refused(completer, endless):
    with pytest.raises(ValueError, match="the last role in messages is 'assistant'; allowed: 'user'"):
        completer.chat([*USER, {"role": "assistant", "content": "ho"}])
    with pytest.raises(TypeError, match="best_of"):
        completer.completions("xy", best_of=2)
    with pytest.raises(ValueError, match="stop_strings: got some, allowed with this engine: none"):
        endless.completions("xy", max_tokens=2, stop="a")
    with pytest.raises(ValueError, match="dtype: got 'fp16', allowed: fp32, bf16"), loaded("nowhere", dtype="fp16"):
        pass


def answers_on_two_ranks(world: World, folder: Path):
    layout = Layout(tensor_model_parallel_size=2)
    mesh = build_mesh(layout, world)
    completer = load_completer(ModelFolder.check(folder, layout, 2), mesh, "fp32", context_length=32)
    sampling = {"n": 4, "max_tokens": 8}
    return texts(completer.completions("xy", seed=7, **sampling)), texts(completer.completions("xy", **sampling))


def test_all_ranks_give_the_same_answer_with_and_without_a_seed(completer, small_run, workers):
    first, second = workers.run(answers_on_two_ranks, 2, small_run.folder / "model")
    assert first == second
    assert first[0] == texts(completer.completions("xy", n=4, max_tokens=8, seed=7))


def test_the_command_shows_each_response_as_a_line_of_json(completer, small_run):
    flags = ["--prompt", "hi", "--prompt", "ho", "--num-samples", "2", "--max-new-tokens", "8", "--seed", "5", "--json"]
    command = [sys.executable, "-m", "megarl", "generate", "--model", str(small_run.folder / "model"), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(
        (json.loads(line) for line in done.stdout.splitlines()), key=lambda x: (x["prompt"], x["sample_index"])
    )
    assert [(line["prompt"], line["prompt_index"], line["sample_index"]) for line in lines] == [
        ("hi", 0, 0),
        ("hi", 0, 1),
        ("ho", 1, 0),
        ("ho", 1, 1),
    ]
    answer = completer.chat(USER, n=2, max_tokens=8, seed=5)
    assert [line["text"] for line in lines[:2]] == [c["message"]["content"] for c in answer["choices"]]
    assert sum(line["num_tokens"] for line in lines[:2]) == answer["usage"]["completion_tokens"]
    assert all(line["log_prob"] < 0 for line in lines)


def test_the_command_shows_text_under_a_line_about_it(capsys):
    job = parse(["--model", "m", "--prompt", "a", "--prompt", "b"])
    job.show(Choice(1, 0, "two\nlines", "length", [5, 6, 7], [-1.0, -1.0, -1.0]))
    assert capsys.readouterr().out == "[prompt 1, sample 0: 3 tokens, length]\ntwo\nlines\n\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompt a --num-samples 0", "error: num_samples: got 0, allowed: from 1"),
        ("--prompt a --top-p 2", "error: top_p: got 2.0, allowed: above 0, at most 1"),
        (
            "--prompt a --max-new-tokens 512",
            "error: prompt + max_new_tokens: got 521 tokens, allowed by the model: at most 512",
        ),
        ("--prompt a --raw --system b", "error: system: got 'b', allowed with raw: none"),
        ("--prompt a --tensor-model-parallel-size 2", "error: world size: got 1, allowed: multiples of tensor 2"),
        ("--prompt a --seed 9223372036854775808", "error: seed: got 9223372036854775808, allowed: 64-bit integers"),
        ("--prompt=", "error: prompt: got '', allowed: text, not empty"),
        ("--prompt a --n 2", "unrecognized arguments: --n 2"),
        ("--num-samples 2", "the following arguments are required: --prompt"),
    ],
)
def test_a_wrong_flag_ends_the_command_with_status_2_and_the_reason(small_run, capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model", str(small_run.folder / "model"), *flags.split()])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_second_copy_of_the_model_is_refused(small_run):
    job = parse(["--model", str(small_run.folder / "model"), "--prompt", "a"])
    with pytest.raises(ValueError, match="world size: got 2, allowed: the ranks of one copy of the model, 1"):
        job.check(world_size=2)


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "generate Generate responses to prompts with a model folder." in " ".join(capsys.readouterr().out.split())
