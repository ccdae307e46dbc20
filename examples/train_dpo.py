"""Train a Qwen policy on preference pairs with DPO, IPO or SLiC's hinge.

    torchrun --nproc-per-node 2 examples/train_dpo.py --model runs/sft/hf --output runs/dpo \\
        --preferences runs/data/preferences.jsonl --eval-preferences runs/data/heldout_preferences.jsonl \\
        --nll 1 --lr 5e-4
    torchrun --nproc-per-node 8 examples/train_dpo.py --model DIR --preferences FILE --dtype bf16 \\
        --tensor-model-parallel-size 2 --sequence-parallel --lr 5e-7

Source: arXiv 2305.18290; --loss ipo: arXiv 2310.12036; --loss hinge: arXiv 2305.10425; --nll: arXiv 2404.19733.
Deviations: AdamW in place of RMSprop; ipo averages log-ratios over the tokens of an answer, where its paper sums them;
hinge compares log-ratios to the reference, where its paper compares log-probs; the reference is always the starting
model, whose log-probs are computed before training and kept in --reference-cache.
"""

from megarl.cli import checked, parse
from megarl.config import RunSettings
from megarl.config_preferences import DPOConfig, DPOSettings, PreferenceSettings
from megarl.dpo import train_dpo
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import running
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings


def main() -> None:
    sections = [RunSettings(), PreferenceSettings(), DPOSettings(), Layout(), OptimizerSettings(), CheckpointSettings()]
    run, data, dpo, layout, optimizer, checkpoints = parse(__doc__, sections)
    config = DPOConfig(run, data, layout, optimizer, dpo, checkpoints=checkpoints)
    world, shape = checked(config)
    with running(world, run.timeout_seconds):
        train_dpo(config, shape, world)


if __name__ == "__main__":
    main()
