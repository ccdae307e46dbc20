"""Time another inference engine on the cases of `benchmarks/rollout.py`, in an interpreter that has it installed.

Needs nothing of this repository, since such engines pin releases of their own. Reads a job as JSON from stdin and
writes the figures as the last line of stdout; ends with status 3 if the engine is not installed.
"""

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: its CPU time is seen
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

NOT_INSTALLED = 3
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def vllm(job: dict[str, Any]) -> tuple[str, Callable[[], int]]:
    """vLLM with its defaults: compiled, continuous batching; its prefix cache starts empty in each run."""
    import vllm

    longest = max(max(row) for row in job["lengths"])
    engine = vllm.LLM(
        model=job["model"],
        dtype=DTYPES[job["dtype"]],
        max_model_len=len(job["prompts"][0]) + longest,
        max_num_seqs=job["num_slots"],
        skip_tokenizer_init=True,
    )
    prompts, params = [], []
    for prompt, lengths in zip(job["prompts"], job["lengths"], strict=True):
        equal = len(set(lengths)) == 1
        for length in lengths[:1] if equal else lengths:
            prompts.append({"prompt_token_ids": prompt})
            wanted = {"n": len(lengths) if equal else 1, "max_tokens": length}
            params.append(vllm.SamplingParams(**wanted, temperature=1.0, ignore_eos=True, detokenize=False))

    def generate() -> int:
        engine.reset_prefix_cache()
        done = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.token_ids) for request in done for output in request.outputs)

    return vllm.__version__, generate


def ctranslate2(job: dict[str, Any]) -> tuple[str, Callable[[], int]]:
    """CTranslate2: batches of as many prompts as fill the slots, each to its longest response."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as folder:
        TransformersConverter(job["model"]).convert(folder, force=True)
        with open(f"{folder}/vocabulary.json", encoding="utf-8") as file:
            vocabulary = json.load(file)
        engine = ctranslate2.Generator(folder, compute_type=DTYPES[job["dtype"]], inter_threads=1, intra_threads=1)
    num_samples = len(job["lengths"][0])
    size = job["num_slots"] // num_samples

    def generate() -> int:
        for start in range(0, len(job["prompts"]), size):
            longest = max(max(row) for row in job["lengths"][start : start + size])
            done = engine.generate_batch(
                [[vocabulary[token] for token in prompt] for prompt in job["prompts"][start : start + size]],
                num_hypotheses=num_samples,
                min_length=longest,
                max_length=longest,
                sampling_topk=0,
                include_prompt_in_result=False,
                end_token=[],
            )
            assert all(len(ids) == longest for result in done for ids in result.sequences_ids), "a response is short"
        return sum(map(sum, job["lengths"]))

    return ctranslate2.__version__, generate


ENGINES = {"vllm": vllm, "ctranslate2": ctranslate2}


def main() -> None:
    job = json.load(sys.stdin)
    if importlib.util.find_spec(job["engine"]) is None:
        sys.exit(NOT_INSTALLED)
    version, generate = ENGINES[job["engine"]](job)
    runs = []
    for _ in range(job["num_warm_ups"] + job["num_runs"]):
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = generate()
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = min(runs[job["num_warm_ups"] :])
    print("\n" + json.dumps({"version": version, "cpu_seconds": cpu, "wall_seconds": wall, "tokens": tokens}))


if __name__ == "__main__":
    main()
