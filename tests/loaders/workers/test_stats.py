"""A loader's figures: sums, a mean, and a bounded list of what was skipped."""

from loaders.workers.stats import KEPT, Stats


def test_every_skipped_sample_is_counted_and_logged_and_the_first_are_listed(caplog):
    stats, bad = Stats(), [(index, f"ValueError: {index}") for index in range(KEPT + 5)]
    assert stats.as_dict()["skipped_samples"] == 0
    stats.count_skipped(bad[:3])
    stats.count_skipped(bad[3:])
    assert (stats.skipped_samples, stats.skipped) == (KEPT + 5, bad[:KEPT])
    assert caplog.messages == [f"sample {index} could not be read and is left out: {why}" for index, why in bad]


def test_a_new_loaders_figures_are_zero_and_the_mean_queue_is_per_batch():
    assert {value for value in Stats().as_dict().values() if value != []} == {0}
    assert Stats(batches=4, queued=6).as_dict()["mean_queued"] == 1.5
    assert Stats(batches=1, queued=6).as_dict()["mean_queued"] == 6
