import dataclasses
import errno
import os
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from megarl.config import RolloutSettings, RunSettings
from megarl.faults import DEVICE_MEMORY, DISK, HOST_MEMORY, explaining_faults
from parallel.checkpoint_folder import CheckpointSettings
from parallel.mesh import Layout

TOO_MUCH = 2**55
"""Bytes no machine has."""


def fail(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def write_to_full_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("call", "kind", "advice", "number"),
    [
        (lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), RuntimeError, HOST_MEMORY, None),
        (lambda: np.empty(TOO_MUCH, dtype=np.uint8), MemoryError, HOST_MEMORY, None),
        (lambda: bytearray(TOO_MUCH), MemoryError, HOST_MEMORY, None),
        (write_to_full_disk, OSError, DISK, errno.ENOSPC),
        (lambda: torch.save(torch.zeros(100_000), "/dev/full"), RuntimeError, DISK, None),
        (fail(RuntimeError("DefaultCPUAllocator: not enough memory: you tried")), RuntimeError, HOST_MEMORY, None),
        (fail(torch.OutOfMemoryError("CUDA out of memory. Tried to")), torch.OutOfMemoryError, DEVICE_MEMORY, None),
        (fail(RuntimeError("CUDA error: out of memory\nmore")), torch.OutOfMemoryError, DEVICE_MEMORY, None),
        (fail(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))), OSError, HOST_MEMORY, errno.ENOMEM),
        (fail(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "hf/x")), OSError, DISK, errno.EDQUOT),
        (fail(SafetensorError("I/O error: No space left on device (os error 28)")), OSError, DISK, errno.ENOSPC),
    ],
)
def test_full_memory_and_disks_say_what_to_change(call, kind, advice, number):
    with pytest.raises(Exception) as original:
        call()
    with pytest.raises(kind) as explained, explaining_faults():
        call()
    assert advice in str(explained.value)
    assert str(original.value) in str(explained.value)
    assert type(explained.value.__cause__) is type(original.value)
    assert getattr(explained.value, "errno", None) == number


def test_other_errors_pass_as_they_are():
    for error in (
        RuntimeError("shapes differ"),
        OSError(errno.ENOENT, os.strerror(errno.ENOENT)),
        ValueError("lr: got 0"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as raised, explaining_faults():
            raise error
        assert raised.value is error
        assert raised.value.__cause__ is None


def test_nothing_happens_without_an_error():
    with explaining_faults():
        pass


def test_every_setting_that_is_named_exists():
    classes = (RunSettings, RolloutSettings, Layout, CheckpointSettings)
    fields = {field.name for kind in classes for field in dataclasses.fields(kind)}
    named = set(re.findall(r"\w+_\w+", DEVICE_MEMORY + HOST_MEMORY + DISK))
    assert {"max_tokens_per_pack", "max_cache_tokens", "max_sequences", "keep_last"} <= named
    assert named <= fields
