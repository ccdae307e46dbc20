"""`explaining_faults`: what to change when memory or the disk is full."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parallel.stored_pieces import WRITE_FAILED

DEVICE_MEMORY = (
    "out of memory on the GPU. Smaller need: a lower max_tokens_per_pack (training); a lower max_cache_tokens or "
    "max_sequences (rollout); more tensor_model_parallel_size or pipeline_model_parallel_size (all)"
)
HOST_MEMORY = (
    "out of memory of the machine, which all its ranks share. Smaller need: a lower max_tokens_per_pack (training); a "
    "lower max_cache_tokens or max_sequences (rollout); more tensor_model_parallel_size or "
    "pipeline_model_parallel_size, on more machines (all)"
)
DISK = (
    "no room on the disk, or a quota is used up. Choose an output folder on another disk, make room, or keep fewer "
    "checkpoints (keep_last, keep_best); then go on with --resume"
)
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = ("No space left on device", "Disk quota exceeded")
"""What libraries say that write by themselves (safetensors)."""
HOST_TEXTS = ("DefaultCPUAllocator: not enough memory", "DefaultCPUAllocator: can't allocate memory")
DEVICE_TEXTS = ("CUDA error: out of memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def explaining_faults() -> Iterator[None]:
    """Turn an error of full memory or a full disk that comes out of the block into one of the same kind that says what
    to change, with the original as its cause. Every other error passes as it is.

    Raises:
        torch.OutOfMemoryError: of a GPU's memory.
        MemoryError, RuntimeError: of the machine's memory, by Python or NumPy, or by torch.
        OSError: of the disk (ENOSPC, EDQUOT) or the machine's memory (ENOMEM).
        RuntimeError: of a file that torch could not write.
    """
    try:
        yield
    except Exception as error:
        explained = _explained(error)
        if explained is None:
            raise
        raise explained from error


def _explained(error: Exception) -> Exception | None:
    """Return an error that says what to change; None for one that is of no such kind."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(f"{DEVICE_MEMORY}: {text}")
    if isinstance(error, MemoryError):
        return MemoryError(f"{HOST_MEMORY}: {text}" if text else HOST_MEMORY)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return OSError(error.errno, f"{HOST_MEMORY}: {text}")
    if isinstance(error, OSError) and error.errno in FULL:
        return OSError(error.errno, f"{DISK}: {text}")
    if any(part in text for part in FULL_TEXTS):
        return OSError(errno.ENOSPC, f"{DISK}: {text}")
    if isinstance(error, RuntimeError) and any(part in text for part in WRITE_FAILED):
        return RuntimeError(f"a file could not be written; most often there is {DISK}: {text}")
    if isinstance(error, RuntimeError) and any(part in text for part in HOST_TEXTS):
        return RuntimeError(f"{HOST_MEMORY}: {text}")
    if isinstance(error, RuntimeError) and any(part in text for part in DEVICE_TEXTS):
        return torch.OutOfMemoryError(f"{DEVICE_MEMORY}: {text}")
    return None
