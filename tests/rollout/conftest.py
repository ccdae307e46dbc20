"""Fixtures of the rollout tests."""

from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_qwens


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A tiny Qwen2 of 4 layers with 150 ids, see `write_tiny_qwens`."""
    return write_tiny_qwens(tmp_path_factory.mktemp("tiny qwen")).qwen2
