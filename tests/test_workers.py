"""The pool that other tests run their ranks on."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.workers import WorkerDied


@dataclass(frozen=True)
class Pair:
    left: int
    right: int


def sum_of_ranks(world, offset):
    value = torch.tensor([float(world.rank + offset)])
    dist.all_reduce(value)
    return value


def fail_on(world, rank):
    if world.rank == rank:
        raise KeyError("no such thing")
    dist.barrier()


def sleep_on(world, rank):
    if world.rank == rank:
        time.sleep(600)


def exit_on(world, rank):
    if world.rank == rank:
        os._exit(3)
    dist.barrier()


def process_id(world):
    return os.getpid()


def swap(world, pair):
    return Pair(pair.right, pair.left + world.rank)


def tensor_size(world, size):
    parallel_state.initialize_model_parallel(size)
    return parallel_state.get_tensor_model_parallel_world_size()


def test_ranks_reduce_over_a_fresh_group_of_any_size(workers):
    for world_size, total in ((2, 1 + 2), (4, 1 + 2 + 3 + 4), (1, 1)):
        assert workers.run(sum_of_ranks, world_size, 1) == [torch.tensor([float(total)])] * world_size


def test_jobs_run_in_the_same_processes_with_another_layout(workers):
    first = workers.run(process_id, 2)
    assert workers.run(tensor_size, 2, 2) == [2, 2]
    assert workers.run(tensor_size, 2, 1) == [1, 1]
    assert workers.run(process_id, 2) == first
    assert os.getpid() not in first


def test_classes_of_a_test_module_travel_both_ways(workers):
    assert workers.run(swap, 2, Pair(1, 5)) == [Pair(5, 1), Pair(5, 2)]


def test_an_exception_is_raised_again_with_its_rank_and_traceback(workers):
    with pytest.raises(KeyError, match="no such thing") as caught:
        workers.run(fail_on, 2, 1)
    cause = str(caught.value.__cause__)
    assert "rank 1 of 2" in cause
    assert "in fail_on" in cause
    assert workers.run(sum_of_ranks, 2, 0) == [torch.tensor([1.0])] * 2


def test_a_hang_is_cut_at_the_time_out_and_the_next_job_works(workers):
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 gave no answer within 1.5 s(.|\n)*in sleep_on"):
        workers.run(sleep_on, 2, 1, timeout_seconds=1.5)
    assert time.monotonic() - started < 60
    assert workers.run(sum_of_ranks, 2, 0) == [torch.tensor([1.0])] * 2


def test_a_dead_worker_is_reported_and_replaced(workers):
    with pytest.raises(WorkerDied, match="rank 0 of 1 ended"):
        workers.run(exit_on, 1, 0)
    assert workers.run(sum_of_ranks, 1, 5) == [torch.tensor([5.0])]


def test_a_single_world_reduces_over_itself(single_world):
    assert sum_of_ranks(single_world, 7) == torch.tensor([7.0])


def test_nested_functions_and_too_many_ranks_are_refused(workers):
    with pytest.raises(ValueError, match="top level"):
        workers.run(lambda world: None, 1)
    with pytest.raises(ValueError, match="world_size: got 9, allowed: 1 to 8"):
        workers.run(process_id, 9)
