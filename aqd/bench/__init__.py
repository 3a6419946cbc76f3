"""``aqd bench``: how fast this aqd is on this machine, measured and not believed.

A real daemon runs on a real database; what is measured is what they have written down or what the kernel has counted,
never an estimate. Imported by ``aqd.cli.bench`` only, when the command is given.

``results`` (what comes out, as it stands in the JSON), ``settings`` (what was asked for), ``machine`` (where), ``database``
(a server and databases of its own), ``node`` (one daemon), ``handlers`` (its plugin), ``measure`` (processor time,
counters, percentiles), ``bench`` (what scenarios are given), ``drained`` (one measured drain), ``producer`` (one open-loop
sender), ``scenarios/`` (one module each), ``report`` (the table), ``chart`` (the PNG; matplotlib is imported there only),
``run`` (all of it, and the cleaning up).

Promises: whatever ends it (the end, an error, Ctrl-C, SIGTERM), no process and no database of its own is left,
unless ``--keep`` asks for them; processes end with it also after ``kill -9``.
"""
