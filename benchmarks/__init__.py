"""The benchmark: closed-loop load on a mesh of its own and, to compare, on a real Triton. `make bench`.

`command` starts servers and measures cell after cell; a cell is a model, a protocol and a concurrency. `load` makes
the load, `usage` reads what it cost, `results` and `plot` show it. Client and servers share one machine, so the client
must be cheap: it builds requests from bytes, and its own CPU time is reported beside that of the servers.
"""
