"""What runs on preference pairs are made of: DPO and the reward model. As `megarl.config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megarl.config import RunSettings, check_folder, check_vocabulary, share_prompts_option
from megarl.data.preferences import TRUNCATIONS, Truncation, read_preference_rows
from megarl.losses import PreferenceLoss
from megarl.resumable import check_checkpoint
from parallel.checkpoint_folder import CheckpointSettings
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings
from parallel.options import option
from parallel.qwen import QwenShape


@dataclass(frozen=True)
class PreferenceSettings:
    """The pairs and how they are used."""

    preferences: Path = option(
        Path("runs/data/preferences.jsonl"),
        "training pairs, JSONL or parquet: prompt, chosen, rejected, perhaps margin; or chosen and rejected as chats",
    )
    eval_preferences: Path | None = option(None, "held-out pairs; none: no evaluation")
    eval_every: int = option(0, "steps between evaluations; 0: only before and after training")
    eval_max_pairs: int = option(512, "held-out pairs used by an evaluation")
    batch_size: int = option(64, "pairs of a step")
    max_tokens: int | None = option(
        None, "limit of prompt and answer together, in tokens; none: half of max_tokens_per_pack, or the model's limit"
    )
    truncation: Truncation = option("keep_end", "which end of a longer prompt and answer is kept")
    share_prompts: bool | None = share_prompts_option("answer")

    def check(self, shape: QwenShape, max_tokens_per_pack: int) -> None:
        """Check the fields by themselves and against the model, and the files.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        for name, bound in (("batch_size", 1), ("eval_every", 0), ("eval_max_pairs", 1)):
            if getattr(self, name) < bound:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: from {bound}")
        if self.truncation not in TRUNCATIONS:
            raise ValueError(f"truncation: got {self.truncation!r}, allowed: {', '.join(TRUNCATIONS)}")
        if max_tokens_per_pack < 4:
            raise ValueError(f"max_tokens_per_pack: got {max_tokens_per_pack}, allowed: from 4, the smallest pair")
        most = longest_row(shape, max_tokens_per_pack)
        if self.max_tokens is not None and not 2 <= self.max_tokens <= most:
            raise ValueError(
                f"max_tokens: got {self.max_tokens}, allowed: 2 to {most}, the model's limit or half of "
                f"max_tokens_per_pack"
            )
        for name, path in (("preferences", self.preferences), ("eval_preferences", self.eval_preferences)):
            if path is None:
                continue
            if not path.is_file():
                raise ValueError(f"{name}: there is no file {str(path)!r}")
            read_preference_rows(path)


def longest_row(shape: QwenShape, max_tokens_per_pack: int) -> int:
    """Return the most tokens of prompt and answer: the two rows of a pair share a pack."""
    return min(shape.max_position_embeddings, max_tokens_per_pack // 2)


@dataclass(frozen=True)
class DPOSettings:
    """The loss of DPO and the log-probs of its reference, the starting model."""

    loss: Literal["sigmoid", "ipo", "hinge"] = option("sigmoid", "of a pair's margin; ipo averages over tokens")
    beta: float = option(0.1, "strength of the pull to the reference")
    label_smoothing: float = option(0.0, "share of pairs taken to be the wrong way round; below 0.5, sigmoid only")
    nll: float = option(0.0, "weight of the chosen answer's mean negative log-likelihood")
    reference_cache: Path = option(Path("runs/cache"), "folder that keeps the reference's log-probs between runs")
    cache_reference: bool = option(True, "use that folder")

    def check(self) -> None:
        """As `RunSettings.check`."""
        self.preference_loss()
        if self.cache_reference:
            check_folder("reference_cache", self.reference_cache)

    def preference_loss(self) -> PreferenceLoss:
        """Return the loss of these settings.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        return PreferenceLoss(self.loss, self.beta, self.label_smoothing, self.nll)


@dataclass(frozen=True)
class RewardModelConfig:
    """A whole run that trains a reward model."""

    run: RunSettings
    data: PreferenceSettings
    layout: Layout
    optimizer: OptimizerSettings
    checkpoints: CheckpointSettings = CheckpointSettings()
    kind: ClassVar[str] = "reward model"

    def check(self, world_size: int) -> QwenShape:
        """Check all values before anything is built; returns the model's shape.

        Raises:
            ValueError: names the field, its value and the values allowed.
        """
        shape = self.run.check(head="scalar")
        _check_common(self, shape, world_size)
        return shape


@dataclass(frozen=True)
class DPOConfig:
    """A whole DPO run."""

    run: RunSettings
    data: PreferenceSettings
    layout: Layout
    optimizer: OptimizerSettings
    dpo: DPOSettings
    checkpoints: CheckpointSettings = CheckpointSettings()
    kind: ClassVar[str] = "dpo"

    def check(self, world_size: int) -> QwenShape:
        """As `RewardModelConfig.check`."""
        shape = self.run.check()
        _check_common(self, shape, world_size)
        self.dpo.check()
        return shape


PreferenceConfig = DPOConfig | RewardModelConfig


def _check_common(config: PreferenceConfig, shape: QwenShape, world_size: int) -> None:
    config.layout.check(shape, world_size)
    config.checkpoints.check()
    check_checkpoint(config.run, config.kind, ["policy"], shape)
    config.data.check(shape, config.run.max_tokens_per_pack)
    check_vocabulary(config.run.model, shape)
