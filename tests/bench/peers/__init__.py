"""aqd beside its peers on one machine: ``python -m tests.bench.peers``. See ``__main__.py``."""
