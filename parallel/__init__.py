"""Models on process groups: launching, meshes, Qwen on megatron-core, schedules, optimizers, weights.

The only package that imports megatron-core; it knows no reinforcement learning.
"""

import warnings

from parallel.cpu import prepare_import

# What megatron-core says at every start of every rank about things that are as we want them.
for _message in (
    "Apex is not installed",  # its fused norms; ours are torch's or Transformer Engine's
    "Transformer Engine and Apex are not installed",  # said once by each of four modules; torch's Adam does
    "full scope is deprecated",  # CUDA graphs, which we don't use
    r"The \.grad attribute of a Tensor that is not a leaf",  # the distributed optimizer clears views of parameters
    r"`torch\.distributed\.\w+` is deprecated",  # collectives renamed in torch 2.13
):
    warnings.filterwarnings("ignore", message=_message)

prepare_import()  # before any module here imports megatron-core; does nothing where there is CUDA
