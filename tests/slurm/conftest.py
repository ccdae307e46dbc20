"""The private cluster of the Slurm tests."""

import pytest

from tests.slurm.cluster import Cluster, missing_programs, private_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Cluster:
    """A running private cluster; without Slurm's programs the tests are skipped."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"no Slurm here ({', '.join(missing)} not found): make slurm-test installs it where it can")
    with private_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running
