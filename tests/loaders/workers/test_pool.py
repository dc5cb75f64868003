"""What pools report."""

from loaders.workers.pool import NO_ROW, WHOLE_BATCH, Result


def test_a_result_counts_nothing_that_its_worker_did_not_tell():
    result = Result(3, "a batch")
    assert (result.number, result.payload, result.error) == (3, "a batch", None)
    assert not any(result[3:-1])
    assert not any(result.work)


def test_the_rows_that_are_none_are_no_rows_of_a_batch():
    assert len({NO_ROW, WHOLE_BATCH, 0}) == 3
    assert max(NO_ROW, WHOLE_BATCH) < 0
