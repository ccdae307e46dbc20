"""The start of a run: its mesh, its folder with `config.json`, and a log file for each rank."""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.config import RunSettings, to_plain
from megarl.report import PANELS, draw_curves
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import World
from parallel.mesh import Layout, Mesh, build_mesh
from parallel.qwen import QwenShape

logger = logging.getLogger(__name__)


class RunConfig(Protocol):
    """What the config of every kind of run has."""

    @property
    def run(self) -> RunSettings: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def checkpoints(self) -> CheckpointSettings: ...

    @property
    def kind(self) -> str: ...

    def check(self, world_size: int) -> QwenShape: ...


def begin_run(config: RunConfig, world: World) -> tuple[Mesh, dict[str, Any]]:
    """Start logging, build the mesh and write the config, whole, to the log (`RunKeeper` writes it to the run folder).

    Returns: the mesh, and the config as plain JSON values.
    """
    run = config.run
    log_to(run.output, world.rank)
    mesh = build_mesh(config.layout, world, run.timeout_seconds)
    plain = to_plain(config)
    logger.info("config: %s", json.dumps(plain, indent=2))
    return mesh, plain


def end_run(output: Path, mesh: Mesh, title: str, panels: Mapping[str, str] = PANELS) -> None:
    """Draw a finished run's curves, and say where it has left its results."""
    if mesh.rank == 0:
        draw_curves(output, title, panels)
        sys.stdout.write(
            f"model {output / 'hf'}   metrics {output / 'metrics.jsonl'}   curves {output / 'curves.png'}\n"
        )
        sys.stdout.flush()


def log_to(folder: Path, rank: int) -> None:
    """Send log lines to `folder/logs/rank_N.log` (from INFO) and, on rank 0, to stderr (from WARNING). On the signal
    SIGUSR2 the stacks of all threads go to that file, too: where does a rank hang?"""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    form = logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    path = folder / "logs" / f"rank_{rank}.log"
    to_file = logging.FileHandler(path, encoding="utf-8")
    handlers: list[logging.Handler] = [to_file]
    if rank == 0:
        to_terminal = logging.StreamHandler(sys.stderr)
        to_terminal.setLevel(logging.WARNING)
        handlers.append(to_terminal)
    for handler in handlers:
        handler.setFormatter(form)
    faulthandler.register(signal.SIGUSR2, path.open("a"), all_threads=True)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
