"""What a Hugging Face folder must hold to become a model; reads only the headers of its weight files."""

from pathlib import Path

from parallel.hf_folder import open_source
from parallel.hf_tensors import SCORE, Head, all_rules
from parallel.qwen import QwenShape


def check_hf(folder: str | Path, shape: QwenShape, head: Head = "lm") -> None:
    """Check that a folder's weight files are whole and hold every tensor of the model; reads only their headers. A
    scalar head may be missing.

    Raises:
        ValueError: a file is missing or broken, or a tensor is missing or has another shape.
    """
    expected = {name: size for rule in all_rules(shape, head).values() for name, size in rule.tensors.items()}
    with open_source(folder) as source:
        if SCORE not in source.names:
            expected.pop(SCORE, None)
        source.check(expected)


def has_scalar_head(folder: str | Path) -> bool:
    """Return whether a folder's model ends in one number: a critic or reward model that was trained."""
    with open_source(folder) as source:
        return SCORE in source.names
