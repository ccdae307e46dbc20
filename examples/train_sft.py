"""Fine-tune a Qwen model on demonstrations: the warm start of the demo, on the backbone of all other training.

    torchrun --nproc-per-node 2 examples/train_sft.py --model runs/tiny --output runs/sft \\
        --demonstrations runs/data/demonstrations.jsonl --lr 3e-3 --num-steps 240
"""

from megarl.cli import checked, parse
from megarl.config import DemonstrationSettings, RunSettings, SFTConfig
from megarl.sft import train_sft
from parallel.checkpoint_folder import CheckpointSettings
from parallel.launch import running
from parallel.mesh import Layout
from parallel.optimizer import OptimizerSettings


def main() -> None:
    sections = [RunSettings(), DemonstrationSettings(), Layout(), OptimizerSettings(), CheckpointSettings()]
    run, data, layout, optimizer, checkpoints = parse(__doc__, sections)
    config = SFTConfig(run, data, layout, optimizer, checkpoints=checkpoints)
    world, shape = checked(config)
    with running(world, run.timeout_seconds):
        train_sft(config, shape, world)


if __name__ == "__main__":
    main()
