"""Fixtures of the tests here."""

import pytest

from tests.megarl.small_run import SmallRun, write_small_run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> SmallRun:
    """Model, prompts and reward of a tiny run."""
    return write_small_run(tmp_path_factory.mktemp("small run"))
