from __future__ import annotations

import os
import time
from multiprocessing import active_children

import pytest

from tlm_jax.data.workers import run_jobs
from tlm_jax.errors import UserError


def _square(shared: int, job: int) -> int:
    return shared + job * job


def _fail(shared: None, job: int) -> int:
    raise UserError("a bad job", where=str(job))


def _die(shared: None, job: int) -> int:
    os._exit(7)


def _sleep(shared: None, job: int) -> int:
    time.sleep(0.0 if job == 0 else 600.0)
    return job


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_every_job_is_done_once(workers: int) -> None:
    assert sorted(run_jobs(_square, 5, range(7), workers)) == [5 + n * n for n in range(7)]
    assert list(run_jobs(_square, 5, [], workers)) == []


def test_an_error_comes_back_as_it_was() -> None:
    with pytest.raises(UserError, match="a bad job") as caught:
        list(run_jobs(_fail, None, [3, 3], 2))
    assert caught.value.where == "3"
    assert not active_children()


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(UserError, match=r"a worker process died \(exit code 7\)"):
        list(run_jobs(_die, None, [0, 1], 2))
    assert not active_children()


def test_leaving_early_kills_the_workers() -> None:
    results = run_jobs(_sleep, None, [0, 1, 2], 2)
    assert next(results) == 0
    results.close()
    assert not active_children()
