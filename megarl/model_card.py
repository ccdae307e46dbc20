"""The model card (README.md) of an exported model: where it comes from, what it measured, how it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_card(algorithm: str, config: Mapping[str, Any], summary: Mapping[str, float]) -> str:
    """Return the text of a model card in Markdown.

    Args:
        algorithm: name of the recipe or of the kind of training.
        config: of the run, as plain values.
        summary: the run's final numbers.
    """
    run = config["run"]
    base = Path(run["model"]).name
    measures = [f"| {name} | {value:.6g} |" for name, value in summary.items()]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            f"tags: [megarl, {json.dumps(algorithm)}]",
            "---",
            f"# {base}, {algorithm}",
            "",
            f"Trained by megarl with {algorithm}, from `{base}`, for {run['num_steps']} steps.",
            "",
            "| measure | value |",
            "|---|---|",
            *measures,
            "",
            "The run's config:",
            "",
            "```json",
            json.dumps(config, indent=2),
            "```",
            "",
        ]
    )
