"""All routes, one module a concern; each module's list is called ``ENDPOINTS``."""

from aqd.api.endpoint import Endpoint
from aqd.api.routes import changes, contract, failed, health, jobs, submit

ENDPOINTS: list[Endpoint] = [
    *submit.ENDPOINTS,
    *jobs.ENDPOINTS,
    *changes.ENDPOINTS,
    *failed.ENDPOINTS,
    *health.ENDPOINTS,
    *contract.ENDPOINTS,
]
