"""Reinforcement learning on top of `parallel` and `rollout`: rewards, losses, recipes, the training step."""
