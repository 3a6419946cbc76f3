"""All routes, one module a concern; each module's list is called ``ENDPOINTS``."""

from aqd.api.endpoint import Endpoint
from aqd.api.routes import (
    bulk,
    changes,
    contract,
    failed,
    health,
    jobs,
    metrics,
    nodes,
    queue_changes,
    queues,
    submit,
    types,
)

ENDPOINTS: list[Endpoint] = [
    *submit.ENDPOINTS,
    *jobs.ENDPOINTS,
    *changes.ENDPOINTS,
    *bulk.ENDPOINTS,
    *queue_changes.ENDPOINTS,
    *failed.ENDPOINTS,
    *health.ENDPOINTS,
    *contract.ENDPOINTS,
    *queues.ENDPOINTS,
    *types.ENDPOINTS,
    *nodes.ENDPOINTS,
    *metrics.ENDPOINTS,
]
