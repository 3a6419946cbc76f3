"""The HTTP service: Falcon resources served by gunicorn, a queue client like any other.

Runs as its own service (``aqd api``) or as a child of the master (``aqd run --with-api``). It holds
no job and no state; killing it at any moment loses nothing that was acknowledged.
"""
