"""What is counted of each replica of a fleet; a part of the table in `statistics`."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.metrics import Chart, counter, gauge

FLEET = "Fleet"  # row of the dashboard


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """Statistics of one replica of a fleet."""

    ready: int = gauge("replica_ready", "1 while the replica takes requests.", Chart(FLEET, "Replicas ready"))
    open_answers: int = gauge("replica_answers_open", "Choices at the replica.", Chart(FLEET, "Choices by replica"))
    backlog_seconds: float = gauge(
        "replica_backlog_seconds",
        "Predicted time until the replica has computed the prompts that it was sent.",
        Chart(FLEET, "Backlog by replica"),
        start=float,
    )
    routed: int = counter(
        "replica_requests", "Requests routed to the replica.", Chart(FLEET, "Requests by replica", unit="reqps")
    )
    lost: int = counter(
        "replica_requests_lost",
        "Requests that were at the replica when it died, and continued elsewhere.",
        Chart(FLEET, "Requests that changed the replica", "died"),
    )
    moved: int = counter(
        "replica_requests_moved",
        "Requests that were moved from the replica to another.",
        Chart(FLEET, "Requests that changed the replica", "moved"),
    )
    restarts: int = counter("replica_restarts", "Restarts of the replica.", Chart(FLEET, "Restarts by replica"))
    predicted_tokens: int = counter(
        "replica_predicted_hit_tokens",
        "Prompt tokens that were expected in the replica's prefix cache when requests were routed.",
        Chart(FLEET, "Prefix hits by replica", "expected"),
    )
    hit_tokens: int = counter(
        "replica_hit_tokens",
        "Prompt tokens of routed requests that the replica did not compute.",
        Chart(FLEET, "Prefix hits by replica", "found"),
    )
