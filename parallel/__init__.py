"""Models on process groups: launching, meshes, Qwen on megatron-core, schedules, optimizers, weights.

The only package that imports megatron-core; it knows no reinforcement learning.
"""
