"""Tokenizers, prompt files and procedural tasks."""
