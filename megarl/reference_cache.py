"""Log-probs of a reference model on disk, so that a second run on the same model and pairs need not compute them."""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.batch import Sample
from parallel.hf_folder import weight_files

logger = logging.getLogger(__name__)

FORMAT = "reference log-probs, version 1"
MIB = 2**20
NUM_PIECES = 64
PIECE_BYTES = 16 * 2**10


@dataclass(frozen=True)
class ReferenceCache:
    """One file: the log-probs of the answer tokens of all samples of a data file.

    Attributes:
        path: named by a hash of everything that the log-probs depend on, so a change of it finds no file.
        lengths: answer tokens of each sample.
    """

    path: Path
    lengths: Sequence[int]

    @staticmethod
    def of(folder: Path, model_folder: Path, dtype: str, samples: Sequence[Sample]) -> ReferenceCache:
        """Return the place in `folder` for the log-probs of samples under the model of a HF folder in a dtype."""
        key = cache_key(model_folder, dtype, samples)
        return ReferenceCache(folder / f"{key}.safetensors", [len(sample.response) for sample in samples])

    def read(self) -> Tensor | None:
        """Return the log-probs of all samples in a row, `[sum(lengths)]` fp32; None if there is no file, or, with a
        warning, if it is broken."""
        if not self.path.is_file():
            return None
        try:
            return self._load()
        except (OSError, SafetensorError, ValueError) as error:
            logger.warning("%s: the reference's log-probs are computed again: %s", self.path, error)
            return None

    def _load(self) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            metadata, log_probs, lengths = file.metadata(), file.get_tensor("log_probs"), file.get_tensor("lengths")
        if lengths.tolist() != list(self.lengths) or log_probs.shape != (sum(self.lengths),):
            raise ValueError(f"it holds {len(log_probs)} log-probs of {len(lengths)} answers, other than the data's")
        if (metadata or {}).get("checksum") != _checksum(log_probs):
            raise ValueError("its checksum is wrong")
        return log_probs

    def write(self, log_probs: Tensor) -> None:
        """Write the file in one step, so that no reader finds half of it; a full disk is only worth a warning."""
        partial = self.path.with_suffix(f".{secrets.token_hex(4)}.partial")
        tensors = {"log_probs": log_probs, "lengths": torch.tensor(self.lengths)}
        try:
            save_file(tensors, partial, metadata={"format": FORMAT, "checksum": _checksum(log_probs)})
            partial.replace(self.path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            logger.warning("%s: the reference's log-probs were not kept: %s", self.path, error)


def cache_key(model_folder: Path, dtype: str, samples: Sequence[Sample]) -> str:
    """Return a hash of the model's config, of each weight file's name, size and parts, of dtype and all token ids.

    Of a weight file the first MiB, with the header, and 64 pieces of 16 KiB spread over all of it are read: training
    changes every matrix, and large models need not be read whole.
    """
    digest = hashlib.blake2b(f"{FORMAT}/{dtype}/".encode(), digest_size=16)
    digest.update((model_folder / "config.json").read_bytes())
    for path in weight_files(model_folder):
        digest.update(f"/{path.name}/{path.stat().st_size}/".encode())
        for piece in _pieces(path):
            digest.update(piece)
    for sample in samples:
        row = (len(sample.prompt), len(sample.response), *sample.prompt, *sample.response)
        digest.update(array("q", row).tobytes())
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        yield file.read(MIB)
        for number in range(NUM_PIECES):
            file.seek(max(0, size - PIECE_BYTES) * number // (NUM_PIECES - 1))
            yield file.read(PIECE_BYTES)


def _checksum(log_probs: Tensor) -> str:
    return hashlib.blake2b(log_probs.numpy().tobytes(), digest_size=16).hexdigest()
