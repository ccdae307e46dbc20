"""Write the demo task's files: prompts, demonstrations half of which are wrong, and preference pairs.

train.jsonl and heldout.jsonl hold prompts with their answers, demonstrations.jsonl chats, preferences.jsonl and
heldout_preferences.jsonl the right answer and the digits in a wrong order. No held-out prompt is in a training file.

python examples/make_sort_data.py --out runs/data
"""

import argparse
from pathlib import Path

from megarl.data.demonstrations import write_demonstrations
from megarl.data.preferences import write_preferences
from megarl.data.prompts import write_prompts
from megarl.data.tasks import SortDigits


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; made if it does not exist")
    parser.add_argument("--num-digits", type=int, default=6, help="digits to sort (default: %(default)s)")
    parser.add_argument("--num-train", type=int, default=8192, help="training prompts (default: %(default)s)")
    parser.add_argument("--num-heldout", type=int, default=512, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--num-demonstrations", type=int, default=12800, help="demonstrations (default: %(default)s)")
    parser.add_argument("--num-preferences", type=int, default=8192, help="training pairs (default: %(default)s)")
    parser.add_argument("--right-fraction", type=float, default=0.5, help="share of right ones (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all of them (default: %(default)s)")
    args = parser.parse_args(arguments)
    for name in ("num_train", "num_heldout", "num_demonstrations", "num_preferences"):
        if vars(args)[name] < 1:
            parser.error(f"{name}: got {vars(args)[name]}, allowed: from 1")
    if not 0 <= args.right_fraction <= 1:
        parser.error(f"right_fraction: got {args.right_fraction}, allowed: 0 to 1")
    try:
        task = SortDigits(args.num_digits)
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    train = [task.example(args.seed, index) for index in range(args.num_train)]
    heldout = [task.example(args.seed, index, "heldout") for index in range(args.num_heldout)]
    # Other prompts than the training ones: indices go on where those end.
    num_shown = args.num_train + args.num_demonstrations
    shown = [task.example(args.seed, index) for index in range(args.num_train, num_shown)]
    compared = [task.example(args.seed, index) for index in range(num_shown, num_shown + args.num_preferences)]
    write_prompts(args.out / "train.jsonl", train)
    write_prompts(args.out / "heldout.jsonl", heldout)
    pairs = ((example, task.demonstration(example, args.seed, args.right_fraction)) for example in shown)
    write_demonstrations(args.out / "demonstrations.jsonl", pairs)
    for name, examples in (("preferences", compared), ("heldout_preferences", heldout)):
        rows = ((example, example.answer, task.wrong_answer(example, args.seed)) for example in examples)
        write_preferences(args.out / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
