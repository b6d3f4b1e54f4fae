"""What remains of the report of a process that has ended."""

from __future__ import annotations

from collections import Counter

from kvasir.serve.telemetry.reports import WorkerReport, total_of
from kvasir.server_statistics import HttpStats


def test_the_open_streams_of_a_process_that_ended_are_broken():
    http = HttpStats(streams=Counter(yes=2, no=3), broken=Counter(no=1), open=7)
    ended = WorkerReport(http, {}).ended.http
    assert (ended.streams, ended.broken, ended.open) == (Counter(), Counter(yes=2, no=4), 0)
    both = total_of(WorkerReport(ended, {}), [WorkerReport(http, {})]).http
    assert both.broken == Counter(yes=2, no=5) and both.streams == http.streams
