"""A whole policy run, from a Hugging Face folder to a Hugging Face folder, or from its last checkpoint on."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from megarl.borders import PolicyBorders, RolloutFiles
from megarl.config import PolicyConfig
from megarl.keeper import RunKeeper, RunStopped
from megarl.model_card import model_card
from megarl.run_folder import begin_run, end_run
from megarl.saved_state import from_plain
from megarl.trainer import PolicyTrainer
from megarl.updates import NotFinite
from parallel.checkpoint import Saved
from parallel.launch import World
from parallel.qwen import QwenShape

logger = logging.getLogger(__name__)


def train_policy(config: PolicyConfig, shape: QwenShape, world: World) -> dict[str, float]:
    """Train a policy from a HF folder to a HF folder; the default process group must be running.

    Writes `config.json`, `metrics.jsonl`, `summary.json`, `logs/`, `checkpoints/` and the trained model `hf/` to the
    run folder.

    Returns: the summary's numbers, on all ranks; those so far, if the run was stopped.
    """
    run = config.run
    mesh, plain = begin_run(config, world)
    trainer = PolicyTrainer(config, shape, mesh)
    models = {"policy": Saved(trainer.policy, run.model)}
    if trainer.critic is not None:
        models["critic"] = Saved(trainer.critic, config.critic.critic_model or run.model)
    with RunKeeper(config, mesh, plain, config.recipe.name, models) as keeper:
        saving = config.checkpoints
        rollouts = RolloutFiles(run.output, mesh, keeper.identity, saving.keep_last) if saving.save_rollouts else None
        if keeper.loaded:
            trainer.restore(from_plain(keeper.loaded.state))
        keeper.accept_config()
        try:
            _train(trainer, keeper, rollouts)
        except RunStopped as stopped:
            logger.warning("%s", stopped)
            return trainer.state.summary
        summary = trainer.state.summary
        keeper.tracker.summarize({**summary, "world_size": mesh.world_size})
        card = model_card(config.recipe.name, plain, summary)
        for name, saved in models.items():
            keeper.export(run.output / ("hf" if name == "policy" else name), saved, card if name == "policy" else "")
    end_run(run.output, mesh, f"{config.recipe.name}: {run.output.name}")
    return summary


def _train(trainer: PolicyTrainer, keeper: RunKeeper, rollouts: RolloutFiles | None) -> None:
    """Take the steps that are left, with evaluations and checkpoints; fills the summary in the state."""
    rollout, num_steps = trainer.config.rollout, trainer.config.run.num_steps
    trainer.responder = replace(trainer.responder, on_border=keeper.status.beat)
    evaluator = trainer.evaluator()
    borders = PolicyBorders(trainer, keeper, rollouts)
    trainer.at_border = borders.within_step
    if trainer.state.step == 0 and trainer.state.under_way is None:
        trainer.state.summary |= {f"{name}_before": value for name, value in evaluator.run().items()}
    while trainer.state.step < num_steps and not (trainer.state.exhausted and rollout.on_exhausted == "stop"):
        started = time.perf_counter()
        if rollouts is not None and trainer.state.under_way is None:
            found = rollouts.replay(trainer.state)
            if found is not None:
                trainer.restore(found)
        try:
            metrics = trainer.step()
        except NotFinite:
            borders.save_now()
            raise
        if rollout.eval_every and trainer.state.step % rollout.eval_every == 0:
            metrics |= {f"eval_{name}": value for name, value in evaluator.run().items()}
        keeper.log(trainer.state.step, metrics, _shown(metrics))
        trainer.state.training_seconds += time.perf_counter() - started
        borders.after_step(metrics)
    summary = trainer.state.summary
    if trainer.state.step < num_steps:
        summary["stopped_at_step"] = trainer.state.step
    summary["training_seconds"] = trainer.state.training_seconds
    summary |= {f"{name}_after": value for name, value in evaluator.run().items()}


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    names = ("score", "loss", "entropy", "grad_norm", "response_tokens")
    return {name: metrics[name] for name in names if name in metrics}
