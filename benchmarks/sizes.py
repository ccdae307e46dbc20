"""Sizes of the models that steps are timed on."""

SIZES = {  # layers, hidden, heads, kv heads, ffn, vocabulary
    "tiny": (4, 128, 4, 2, 384, 64),
    "mid": (8, 512, 8, 4, 1408, 8192),
}
