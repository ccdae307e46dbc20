"""Fixtures of the tests of training: tiny models, and a tiny run with all its files."""

from types import SimpleNamespace

import pytest

from tests.megarl.small_run import SmallRun, write_small_run
from tests.tiny_model import write_tiny_qwens


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory) -> SimpleNamespace:
    """Folders of the tiny models, see `write_tiny_qwens`."""
    return write_tiny_qwens(tmp_path_factory.mktemp("tiny qwen"))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> SmallRun:
    """Model, prompts and reward of a tiny run."""
    return write_small_run(tmp_path_factory.mktemp("small run"))
