import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megarl.rewards.pool import RewardPool, RewardTimeout

ROOT = Path(__file__).parents[3]
LONG_SECONDS = 60.0
SHORT_SECONDS = 0.2


def result(pool: RewardPool, future) -> float:
    assert pool.wait(future, LONG_SECONDS)
    return future.result(timeout=0)


def fail() -> float:
    raise KeyError("no such answer")


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_each_call_has_its_own_result_or_error(num_threads):
    pool = RewardPool(num_threads, LONG_SECONDS)
    futures = [pool.submit(lambda number=number: number / 4) for number in range(20)]
    failing = pool.submit(fail)
    assert [result(pool, future) for future in futures] == [number / 4 for number in range(20)]
    with pytest.raises(KeyError, match="no such answer"):
        result(pool, failing)
    assert result(pool, pool.submit(lambda: 7.0)) == 7.0


def test_as_many_calls_run_at_a_time_as_there_are_threads():
    """Three meet, nine times three could."""
    pool, barrier, running, most = RewardPool(3, LONG_SECONDS), threading.Barrier(3), set(), []

    def meet() -> float:
        running.add(threading.current_thread())
        most.append(len(running))
        place = barrier.wait(LONG_SECONDS)
        running.discard(threading.current_thread())
        return place

    futures = [pool.submit(meet) for _ in range(9)]
    places = sorted(result(pool, future) for future in futures)
    assert places == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert max(most) == 3


def test_calls_of_one_thread_run_in_order_and_it_ends_with_the_work():
    pool, order = RewardPool(1, LONG_SECONDS), []
    futures = [pool.submit(lambda number=number: order.append(number) or 0.0) for number in range(50)]
    assert result(pool, futures[-1]) == 0.0
    assert order == list(range(50))
    deadline = time.monotonic() + LONG_SECONDS
    while pool._running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_threads_the_caller_calls():
    threads = []
    RewardPool(0).submit(lambda: threads.append(threading.current_thread()) or 0.0)
    assert threads == [threading.current_thread()]


def test_a_hanging_call_is_given_up_and_its_thread_replaced():
    pool, let_go = RewardPool(1, SHORT_SECONDS), threading.Event()
    begun = time.monotonic()
    hanging = pool.submit(lambda: float(let_go.wait(LONG_SECONDS)))
    after = pool.submit(lambda: 3.0)
    assert not pool.wait(after, SHORT_SECONDS / 4)
    assert result(pool, after) == 3.0
    assert SHORT_SECONDS <= time.monotonic() - begun < LONG_SECONDS / 2
    with pytest.raises(RewardTimeout):
        result(pool, hanging)
    let_go.set()  # what comes too late is dropped
    assert result(pool, pool.submit(lambda: 4.0)) == 4.0
    with pytest.raises(RewardTimeout):
        hanging.result(timeout=0)


def test_time_counts_from_the_beginning_of_a_call():
    """Ten calls in one thread: the last waits longer than the limit before it begins."""
    pool = RewardPool(1, 7.5 * SHORT_SECONDS)
    futures = [pool.submit(lambda number=number: time.sleep(SHORT_SECONDS) or number) for number in range(10)]
    assert [result(pool, future) for future in futures] == list(range(10))


def test_an_answer_that_comes_too_late_does_not_count_though_nobody_looked():
    pool = RewardPool(1, SHORT_SECONDS)
    late = pool.submit(lambda: time.sleep(2 * SHORT_SECONDS) or 1.0)
    assert isinstance(late.exception(timeout=LONG_SECONDS), RewardTimeout)
    assert pool._abandoned == []


def test_too_many_hanging_calls_end_the_run():
    pool, let_go = RewardPool(2, SHORT_SECONDS, max_abandoned=4), threading.Event()
    futures = [pool.submit(lambda: float(let_go.wait(LONG_SECONDS))) for _ in range(6)]
    with pytest.raises(RuntimeError, match=r"4 calls of the reward hang.*within 0\.2 s \(reward_timeout_seconds\)"):
        pool.wait(futures[-1], LONG_SECONDS)
    assert not futures[-1].done()
    pool.cancel()
    let_go.set()


def test_calls_that_come_back_late_are_not_too_many():
    """Slow is not hanging: the threads end."""
    pool = RewardPool(2, SHORT_SECONDS, max_abandoned=4)
    futures = [pool.submit(lambda: time.sleep(1.5 * SHORT_SECONDS) or 1.0) for _ in range(12)]
    for future in futures:
        with pytest.raises(RewardTimeout):
            result(pool, future)


def test_cancelled_calls_never_begin():
    pool, begun, let_go, called = RewardPool(1, LONG_SECONDS), threading.Event(), threading.Event(), []
    running = pool.submit(lambda: begun.set() or float(let_go.wait(LONG_SECONDS)))
    waiting = [pool.submit(lambda: called.append(1) or 0.0) for _ in range(3)]
    assert begun.wait(LONG_SECONDS)
    pool.cancel()
    let_go.set()
    assert result(pool, running) == 1.0
    assert all(future.cancelled() for future in waiting)
    assert result(pool, pool.submit(lambda: 5.0)) == 5.0
    assert called == []


@pytest.mark.parametrize("hang", ["time.sleep(1000)", "exec('while True: pass')"])
def test_a_process_ends_while_its_calls_hang(hang):
    code = (
        "import time; from megarl.rewards.pool import RewardPool\n"
        "pool = RewardPool(2, 0.1)\n"
        f"futures = [pool.submit(lambda: {hang}) for _ in range(3)]\n"
        "print([pool.wait(future, 60.0) for future in futures], futures[2].exception())\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.startswith("[True, True, True]")
    assert ended.stderr == ""
