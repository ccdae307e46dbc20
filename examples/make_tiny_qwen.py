"""Write a randomly initialised Qwen of test size as a Hugging Face folder: weights, config, tokenizer, stop ids.

    python examples/make_tiny_qwen.py --out runs/tiny

The defaults are the demo's model: 2 layers, hidden size 64, a vocabulary of 320 tokens, 119,360 parameters.
"""

import argparse
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megarl.cli import refusing_wrong_values
from megarl.data.tokenizer import CHAT_END, TEXT_END, build_tiny_tokenizer, load_tokenizer

FAMILIES = ("qwen2", "qwen2.5", "qwen3")  # Qwen2.5 has Qwen2's architecture and its name in config.json


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made if it does not exist")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2", help="architecture (default: %(default)s)")
    sizes = {
        "--hidden-size": (64, "width of the residual stream"),
        "--num-layers": (2, "decoder layers; a multiple of the pipeline stages, virtual ones included"),
        "--heads": (4, "query heads"),
        "--kv-heads": (2, "key and value heads; divides --heads"),
        "--ffn": (192, "width of the feed-forward layer"),
        "--max-positions": (512, "longest sequence, in tokens"),
        "--seed": (0, "seed of the random weights"),
    }
    for flag, (default, meaning) in sizes.items():
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    parser.add_argument(
        "--head-dim", type=int, metavar="N", help="size of a head, qwen3 only (default: hidden / heads)"
    )
    theta = "base of the rotary frequencies (default: %(default)s)"
    parser.add_argument("--rope-theta", type=float, default=10000.0, metavar="X", help=theta)
    parser.add_argument("--untied", action="store_true", help="an output matrix of its own (default: the embedding)")
    return parser.parse_args(arguments)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for sizes that no Qwen can have."""
    sizes = ("hidden_size", "num_layers", "heads", "kv_heads", "ffn", "max_positions")
    for name in sizes:
        if vars(args)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {vars(args)[name]}; allowed: 1 or more")
    if args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads is {args.kv_heads}; allowed: divisors of --heads = {args.heads}")
    if args.head_dim is not None and args.family != "qwen3":
        raise ValueError(f"--head-dim is {args.head_dim}; allowed with {args.family}: left out (hidden size / heads)")
    if args.head_dim is None and args.hidden_size % args.heads:
        raise ValueError(f"--hidden-size is {args.hidden_size}; allowed: multiples of --heads = {args.heads}")
    head_dim = args.head_dim or args.hidden_size // args.heads
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"the head size is {head_dim}; allowed: even numbers (rotary embedding turns pairs)")


def build_model(args: argparse.Namespace, vocab_size: int) -> PreTrainedModel:
    """Return the model with fp32 weights drawn from `args.seed`."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "intermediate_size": args.ffn,
        "max_position_embeddings": args.max_positions,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": not args.untied,
    }
    torch.manual_seed(args.seed)
    if args.family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=args.head_dim or args.hidden_size // args.heads))
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with refusing_wrong_values():
        check_arguments(args)
    build_tiny_tokenizer(args.out)
    vocab = load_tokenizer(args.out).get_vocab()
    model = build_model(args, len(vocab))
    stops = [vocab[CHAT_END], vocab[TEXT_END]]
    model.config.eos_token_id, model.config.pad_token_id = stops[0], vocab[TEXT_END]
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=vocab[TEXT_END])
    model.save_pretrained(args.out)
    print(f"{args.out}: {args.family}, {sum(p.numel() for p in model.parameters()):,} parameters, {len(vocab)} tokens")


if __name__ == "__main__":
    main()
