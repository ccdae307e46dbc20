"""Hugging Face folder <-> this rank's model chunks, exactly, as a stream: no rank ever holds the whole model."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.hf_folder import (
    TensorInfo,
    copy_companions,
    open_source,
    plan_shards,
    write_json,
    write_shards,
)
from parallel.hf_tensors import LAYER, SCORE, Rule, all_rules, assemble, fuse, tensor_rules
from parallel.mesh import Mesh
from parallel.model import QwenModel
from parallel.qwen import QwenShape, hf_config, read_shape
from parallel.whole_folder import appears_whole

logger = logging.getLogger(__name__)

MODEL_CARD = "README.md"
Key = tuple[str, ...]
"""Names of the Hugging Face tensors that one parameter is made of."""


@torch.no_grad()
def import_hf(folder: str | Path, chunks: list[QwenModel], mesh: Mesh, seed: int = 0) -> None:
    """Copy the weights of a folder into this rank's chunks in place, cast to the parameters' dtype.

    Rows that pad the vocabulary become zeros. A tied output matrix on a later stage is filled from the embedding. A
    scalar head is read from `score.weight`; where the folder has none it is drawn from a normal distribution of
    standard deviation `initializer_range`, the same on every rank for a given `seed`. If an optimizer with fp32 master
    weights exists already, it must reload them afterwards.

    Raises:
        ValueError: a tensor is missing or has another shape than the model needs; on every rank alike, before any
            parameter has changed.
    """
    shape, head = chunks[0].shape, chunks[0].head
    expected = {name: size for rule in all_rules(shape, head).values() for name, size in rule.tensors.items()}
    with open_source(folder) as source:
        fresh_head = head == "scalar" and SCORE not in source.names
        if fresh_head:
            del expected[SCORE]
        try:
            source.check(expected)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        if mesh.rank == 0:
            _warn(folder, source.names - set(expected), shape, fresh_head)
        for rule, parameter in local_parameters(chunks):
            if SCORE in rule.tensors and fresh_head:
                parameter.copy_(_fresh_head(shape, seed))
            else:
                parameter.copy_(fuse(rule, source.read, mesh.tensor_rank, mesh.tensor_size, parameter))


def export_hf(
    folder: str | Path,
    chunks: list[QwenModel],
    mesh: Mesh,
    source_folder: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    card: str = "",
) -> None:
    """Write the model as a Hugging Face folder, in the parameters' dtype. Every rank of the job must call it.

    Rank 0 writes into a hidden folder beside `folder` and renames it when all is written. With `source_folder` its
    companion files are copied, and its config.json too where it states the model as it is now; settings that were
    changed since (dtype, rotary override, head) are replaced. A scalar head becomes `score.weight`. `card` is the text
    of the model card, README.md; that of the source is then kept as README.base.md.

    Raises:
        ValueError: `folder` exists and is not empty, `source_folder` is no model folder, `max_shard_bytes` is below 1.
    """
    target = Path(folder)
    problem = [_problem(target, source_folder, max_shard_bytes) if mesh.rank == 0 else None]
    dist.broadcast_object_list(problem, src=0, device=mesh.device)
    if problem[0] is not None:
        raise ValueError(problem[0])
    if mesh.data_rank == 0:
        tensors = _whole_tensors(chunks, mesh)
        if mesh.rank == 0:
            _write(target, tensors, chunks[0], source_folder, max_shard_bytes, card)
        for _ in tensors:  # sends; only rank 0 is given tensors, and has written them all
            raise AssertionError("a tensor is left over")
    dist.barrier()


def local_parameters(chunks: list[QwenModel]) -> Iterator[tuple[Rule, torch.nn.Parameter]]:
    """Yield this rank's parameters, each with the rule of its layer."""
    for chunk in chunks:
        rules = tensor_rules(chunk.shape, chunk.head)
        for name, parameter in chunk.named_parameters():
            match = LAYER.match(name)
            if match is None:
                yield rules[name], parameter
            else:
                number = chunk.decoder.layers[int(match["index"])].layer_number  # over the whole model, from 1
                yield rules[LAYER.sub("decoder.layers.", name)].at(number - 1), parameter


def _warn(folder: str | Path, unused: set[str], shape: QwenShape, fresh_head: bool) -> None:
    """One warning each for tensors left out and for a new head; an output matrix without use needs none."""
    if shape.tie_word_embeddings or fresh_head:
        unused = unused - {"lm_head.weight"}
    if unused:
        logger.warning(
            "%s: ignoring %d tensors unknown to the model: %s", folder, len(unused), ", ".join(sorted(unused))
        )
    if fresh_head:
        logger.warning("%s: no %s; the scalar head starts from random values", folder, SCORE)


def _fresh_head(shape: QwenShape, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, shape.hidden_size, generator=generator) * shape.initializer_range


def _whole_tensors(chunks: list[QwenModel], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yield all Hugging Face tensors on rank 0 (CPU), in the order of `all_rules`; run through it on the others.

    Collectives: over the tensor group of the stage that holds the parameter, and one message per tensor in the pipeline
    group of tensor rank 0, both for data rank 0 only.
    """
    local = {tuple(rule.tensors): parameter for rule, parameter in reversed(list(local_parameters(chunks)))}
    owners = parameter_owners(list(local), mesh)
    dtype = chunks[0].config.params_dtype
    for key, rule in all_rules(chunks[0].shape, chunks[0].head).items():
        if mesh.pipeline_rank == owners[key]:
            shards = gather_shards(local[key].detach().to(dtype).contiguous(), rule, mesh)
            tensors = assemble(rule, shards) if mesh.tensor_rank == 0 else {}
        elif mesh.rank == 0:
            tensors = {name: torch.empty(size, dtype=dtype, device=mesh.device) for name, size in rule.tensors.items()}
        else:
            continue
        for name, tensor in tensors.items():
            if mesh.rank != 0:
                dist.send(tensor.contiguous(), dst=0, group=mesh.pipeline_group)
                continue
            if owners[key] != 0:
                source = mesh.rank_of(tensor_rank=0, pipeline_rank=owners[key], data_rank=0)
                dist.recv(tensor, src=source, group=mesh.pipeline_group)
            yield name, tensor.cpu().contiguous()


def parameter_owners(keys: list[Key], mesh: Mesh) -> dict[Key, int]:
    """Return the pipeline rank of each parameter; of a tied output matrix, that of the embedding."""
    by_stage: list[list[Key]] = [[] for _ in range(mesh.pipeline_size)]
    dist.all_gather_object(by_stage, keys, group=mesh.pipeline_group)
    return {key: stage for stage in reversed(range(mesh.pipeline_size)) for key in by_stage[stage]}


def gather_shards(shard: Tensor, rule: Rule, mesh: Mesh) -> list[Tensor]:
    """Return the shards of the tensor group on tensor rank 0, an empty list on the others."""
    if rule.split_dim is None or mesh.tensor_size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(mesh.tensor_size)] if mesh.tensor_rank == 0 else None
    root = mesh.rank_of(tensor_rank=0, pipeline_rank=mesh.pipeline_rank, data_rank=mesh.data_rank)
    dist.gather(shard, shards, dst=root, group=mesh.tensor_group)
    return shards or []


def _problem(target: Path, source_folder: str | Path | None, max_shard_bytes: int) -> str | None:
    """Return what is wrong with the arguments, as rank 0 sees it."""
    if max_shard_bytes < 1:
        return f"max_shard_bytes is {max_shard_bytes}; allowed: 1 or more"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        return f"export folder is {str(target)!r}: it exists and is not empty"
    if source_folder is not None:
        try:
            read_shape(source_folder)
        except ValueError as error:
            return str(error)
    return None


def _write(
    target: Path,
    tensors: Iterator[tuple[str, Tensor]],
    model: QwenModel,
    source: str | Path | None,
    max_shard_bytes: int,
    card: str,
) -> None:
    dtype = model.config.params_dtype
    infos = [
        TensorInfo(name, size, dtype)
        for rule in all_rules(model.shape, model.head).values()
        for name, size in rule.tensors.items()
    ]
    with appears_whole(target) as folder:
        write_shards(folder, tensors, plan_shards(infos, max_shard_bytes))
        _write_config(folder / "config.json", model, source)
        if source is not None:
            copy_companions(Path(source), folder)
        if card:
            of_source = folder / MODEL_CARD
            if of_source.exists():
                of_source.rename(folder / "README.base.md")
            of_source.write_text(card, encoding="utf-8")


def _write_config(path: Path, model: QwenModel, source: str | Path | None) -> None:
    """Copy the source's config.json, or where it would misstate the model, replace those settings in it."""
    wanted = hf_config(model.shape, model.config.params_dtype)
    if model.head == "scalar":
        architecture = wanted["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        wanted |= {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        wanted["tie_word_embeddings"] = False  # there is no output matrix
    if source is None:
        write_json(path, wanted)
        return
    original = (Path(source) / "config.json").read_bytes()
    stated: dict[str, Any] = json.loads(original)
    same_dtype = stated.get("torch_dtype", stated.get("dtype")) in (None, wanted["torch_dtype"])
    if read_shape(source) == model.shape and same_dtype and model.head == "lm":
        path.write_bytes(original)
    else:
        restated = {"dtype", "layer_types", "original_max_position_embeddings"}  # `wanted` says the same by other keys
        write_json(path, {key: value for key, value in stated.items() if key not in restated} | wanted)
