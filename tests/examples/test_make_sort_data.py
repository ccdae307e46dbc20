import json

from examples.make_sort_data import main
from megarl.data.demonstrations import read_demonstrations
from megarl.data.preferences import read_preferences
from megarl.data.prompts import read_prompts
from megarl.data.tokenizer import build_tiny_tokenizer, load_tokenizer


def test_files_read_back_and_no_held_out_prompt_is_in_a_training_file(tmp_path):
    sizes = {"train": 40, "heldout": 20, "demonstrations": 30, "preferences": 50}
    main(["--out", str(tmp_path), *(word for name, size in sizes.items() for word in (f"--num-{name}", str(size)))])
    build_tiny_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    pairs = {
        name: read_preferences(tmp_path / f"{name}.jsonl", tokenizer, 319)
        for name in ("preferences", "heldout_preferences")
    }
    assert len(read_prompts(tmp_path / "train.jsonl")) == 40
    assert len(read_demonstrations(tmp_path / "demonstrations.jsonl", tokenizer, 319)) == 30
    assert {name: len(found) for name, found in pairs.items()} == {"preferences": 50, "heldout_preferences": 20}
    assert all(pair.chosen != pair.rejected for found in pairs.values() for pair in found)
    heldout = texts(tmp_path / "heldout.jsonl")
    assert texts(tmp_path / "heldout_preferences.jsonl") == heldout
    files = [texts(tmp_path / f"{name}.jsonl") for name in ("train", "demonstrations", "preferences")]
    assert not heldout & set().union(*files)


def texts(path) -> set[str]:
    """The user's messages of a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row.get("prompt") or row["messages"])[0]["content"] for row in rows}
