"""Text <-> token ids: Hugging Face tokenizer folders, sentencepiece models, and a 320-token tokenizer of our own.

Sentencepiece models are wrapped directly: transformers 5 turns a lone `tokenizer.model` into a tokenizer that drops the
model's own normalisation (repeated spaces, tabs) and decodes a leading space more.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

HF_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
CHAT_END = "<|im_end|>"
TEXT_END = "<|endoftext|>"
TINY_VOCAB_SIZE = 320

# The split of Qwen2's tokenizer (transformers, tokenization_qwen2.py): every digit stands alone.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words that are one token in the tiny vocabulary. Each prefix of two letters or more is a token too: 61 in all.
_TINY_WORDS = (
    *("Ġthe", "Ġis", "Ġand", "Ġof", "Ġto", "Ġin", "Ġsum", "Ġorder"),  # Ġ is byte-level BPE's letter for a space
    *("system", "user", "assistant"),
    *("answer", "Answer", "digits", "sort", "think", "boxed"),
)
_SPECIAL_TOKENS = (TEXT_END, "<|im_start|>", CHAT_END)
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Tokenizer(Protocol):
    """What megarl asks of a tokenizer; those of transformers and `SentencePieceTokenizer` have it."""

    chat_template: str | None
    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **options: Any) -> Any: ...


class SentencePieceTokenizer:
    """A sentencepiece model: `encode` and `decode` give exactly what the sentencepiece library gives.

    Args:
        path: the `.model` file.

    Raises:
        ValueError: the file is not a sentencepiece model.
    """

    chat_template: str | None = None

    def __init__(self, path: Path) -> None:
        try:
            self._model = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"tokenizer is {str(path)!r}; allowed: a sentencepiece model ({error})") from error
        self.eos_token_id = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.bos_token_id = self._model.bos_id() if self._model.bos_id() >= 0 else None

    def __len__(self) -> int:
        return self._model.vocab_size()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; `add_special_tokens` puts the model's begin token, if it has one, before them."""
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return begin + self._model.encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; sentencepiece gives control tokens no text, so they cannot be kept.

        Raises:
            ValueError: `skip_special_tokens` is False.
        """
        if not skip_special_tokens:
            raise ValueError("skip_special_tokens is False; allowed with a sentencepiece model: True")
        # A model's padded vocabulary has ids that the tokenizer lacks; like those of transformers they have no text.
        return self._model.decode([token for token in token_ids if token < len(self)])

    def get_vocab(self) -> dict[str, int]:
        """Return piece -> id."""
        return {self._model.id_to_piece(index): index for index in range(len(self))}

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **options: Any) -> Any:
        """Raise ValueError: a sentencepiece model has no chat template."""
        raise ValueError("a sentencepiece model has no chat template; allowed: plain text prompts")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a Hugging Face tokenizer folder, or a sentencepiece model (a file, or the only `.model` file of a folder).

    Nothing is fetched from the network and no code from the folder is run.

    Raises:
        ValueError: there is no such tokenizer at `path`, or its files are broken.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if any((path / name).is_file() for name in HF_FILES):
        try:
            return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"tokenizer folder {str(path)!r} cannot be loaded: {error}") from error
    sentencepiece_files = sorted(path.glob("*.model"))
    if len(sentencepiece_files) == 1:
        return SentencePieceTokenizer(sentencepiece_files[0])
    found = ", ".join(file.name for file in sentencepiece_files) or "none of them"
    allowed = f"a folder with one of {', '.join(HF_FILES)}, or with exactly one sentencepiece .model file"
    raise ValueError(f"tokenizer is {str(path)!r} (found: {found}); allowed: {allowed}, or such a file")


def stop_token_ids(tokenizer: Tokenizer, model_folder: str | Path) -> tuple[int, ...]:
    """Return every id that ends a response, sorted: the one set for sampler, mask, reward and metrics.

    The union of `eos_token_id` in the model's generation_config.json (one id or a list; config.json where that file is
    missing), the tokenizer's end token, and `<|im_end|>` where the vocabulary has it.

    Raises:
        ValueError: no id at all, or an `eos_token_id` that is not made of ids.
    """
    stops = set(_configured_stops(Path(model_folder)))
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    vocab = tokenizer.get_vocab()
    if CHAT_END in vocab:
        stops.add(vocab[CHAT_END])
    if not stops:
        raise ValueError(
            f"eos_token_id is missing in {str(model_folder)!r} and in the tokenizer; allowed: one id or more"
        )
    return tuple(sorted(stops))


def response_end(tokenizer: Tokenizer, model_folder: str | Path) -> int:
    """Return the id that ends a response to learn from: the tokenizer's end token, else the first of
    `stop_token_ids`."""
    end = tokenizer.eos_token_id
    return stop_token_ids(tokenizer, model_folder)[0] if end is None else end


def _configured_stops(model_folder: Path) -> list[int]:
    paths = [model_folder / "generation_config.json", model_folder / "config.json"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return []
    value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(f"{path}: eos_token_id is {value!r}; allowed: an id (0 or more), a list of ids, or null")
    return ids


def build_tiny_tokenizer(folder: str | Path) -> None:
    """Write a tokenizer of Qwen2's class with exactly 320 tokens and a ChatML template, for models of test size.

    Ids 0-255 are the bytes in GPT-2's order ("0" is 15, as in Qwen), 256-316 merges that make the chat roles one token
    each, 317 `<|endoftext|>` (padding), 318 `<|im_start|>`, 319 `<|im_end|>` (end of a turn).
    """
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = list(dict.fromkeys((word[:end], word[end]) for word in _TINY_WORDS for end in range(1, len(word))))
    vocab |= {left + right: len(vocab) + index for index, (left, right) in enumerate(merges)}
    assert len(vocab) + len(_SPECIAL_TOKENS) == TINY_VOCAB_SIZE
    write_qwen_tokenizer(folder, vocab, merges)


def write_qwen_tokenizer(folder: str | Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Write a tokenizer folder of Qwen2's class from a byte-level BPE vocabulary, with our ChatML template.

    `<|endoftext|>`, `<|im_start|>` and `<|im_end|>` get the ids after those of `vocab`.
    """
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": CHAT_END,
        "pad_token": TEXT_END,
        "unk_token": None,
        "chat_template": _CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
