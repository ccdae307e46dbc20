"""Fixtures of the distributed tests."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_model import write_tiny_qwens


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory) -> SimpleNamespace:
    """Folders of the tiny models, see `write_tiny_qwens`."""
    folder: Path = tmp_path_factory.mktemp("tiny qwen")
    return write_tiny_qwens(folder)
