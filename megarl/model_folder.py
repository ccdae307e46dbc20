"""A Hugging Face model folder: checked before any process group exists, loaded after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.config import DTYPES, check_vocabulary
from megarl.data.tokenizer import Tokenizer, load_tokenizer, stop_token_ids
from parallel.hf_checks import check_hf
from parallel.mesh import Layout, Mesh
from parallel.model import QwenModel, build_model
from parallel.qwen import QwenShape, read_shape
from parallel.weights import import_hf


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose config, tokenizer and tensor headers have been read; the weights are still on disk."""

    folder: Path
    shape: QwenShape
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]

    @staticmethod
    def check(folder: Path, layout: Layout, world_size: int) -> ModelFolder:
        """Read what needs no process group.

        Raises:
            ValueError: the folder lacks a part of the model or its tokenizer, or the layout doesn't fit model or world.
        """
        if not (folder / "config.json").is_file():
            raise ValueError(f"model: got {str(folder)!r}, allowed: a folder with a config.json")
        shape = read_shape(folder)
        layout.check(shape, world_size)
        check_hf(folder, shape)
        check_vocabulary(folder, shape)
        tokenizer = load_tokenizer(folder)
        return ModelFolder(folder, shape, tokenizer, stop_token_ids(tokenizer, folder))

    def load(self, mesh: Mesh, dtype: str) -> list[QwenModel]:
        """Return this rank's chunks with the folder's weights; every rank must call it."""
        models = build_model(self.shape, mesh, DTYPES[dtype])
        import_hf(self.folder, models, mesh)
        return models
