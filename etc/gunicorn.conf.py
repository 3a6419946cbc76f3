"""How gunicorn serves aqd's API. Read by `aqd api`, which adds from aqd.toml: the address, `workers`,
`threads`, the time limits that follow from `request_timeout_s`, and the log.

Not options of aqd.toml, because a wrong value here is an open door rather than a matter of taste. Every
limit says what it keeps out.
"""

# --- connections ---------------------------------------------------------------------------------

# Clients are waited for in the event loop, whole requests go to the threads (aqd/api/gate.py).
worker_class = "aqd.api.gate.GateWorker"

# Connections of one worker, idle and slow ones included. Below 1024, the usual limit of descriptors,
# with room for database connections; beyond it gunicorn leaves new ones in the backlog.
worker_connections = 800
backlog = 1024

# Idle seconds after which a kept connection is closed. Longer than a proxy's pause between requests,
# shorter than a client needs to collect 800 connections by being idle.
keepalive = 5

# --- requests ------------------------------------------------------------------------------------

# Longest request line: a cursor and three filters need 400 bytes.
limit_request_line = 4094
# The admin key and what proxies add. 64 fields of 8 KiB are what one request can make us hold.
limit_request_fields = 64
limit_request_field_size = 8190

# A header with an underscore could pose as another one (X_Admin_Key); drop it.
header_map = "drop"
# No proxy is trusted: X-Forwarded-* changes nothing here, neither scheme nor address.
forwarded_allow_ips = ""
forwarder_headers = ""
# HTTP/1.1 only.
http_protocols = "h1"

# --- the process ---------------------------------------------------------------------------------

# Shown by ps as "gunicorn: master [aqd.api]".
proc_name = "aqd.api"
# Load the application after the fork: a pool of database connections does not survive one.
preload_app = False
# gunicorn's own control socket would lie in the home directory; systemd and aqd do its work.
control_socket_disable = True
# Where the worker's heartbeat file lies: in memory, because a full or slow disk must not kill workers.
worker_tmp_dir = "/dev/shm"
# Seconds without a heartbeat of the event loop (not of a request) until a worker is replaced.
timeout = 30
# Seconds that requests in progress have when the service stops.
graceful_timeout = 15
umask = 0o077

# --- the log -------------------------------------------------------------------------------------

# No access log: a line for each poll of each client. A proxy in front has one, with TLS names in it.
accesslog = None
# gunicorn's own messages go to aqd's log (set by aqd api).
