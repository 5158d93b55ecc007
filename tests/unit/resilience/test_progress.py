"""Time in which this process did not run is no wait."""

from megatron_ext.resilience.progress import Pauses


def test_pauses_since_the_begin_of_a_wait_do_not_count() -> None:
    pauses = Pauses()
    pauses.note(1000.0, 900.0)
    pauses.note(1100.0, 1098.0)
    assert [pauses.time_run(began, 1200.0) for began in (800.0, 1050.0)] == [300.0, 150.0], "2 s are a busy machine"
