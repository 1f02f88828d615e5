"""The benchmark: closed-loop load on a mesh of its own and, to compare, on a real Triton. `make bench`.

`command` starts servers and goes through the cells (model, protocol, concurrency); `load` makes the load, `usage` reads
what it cost, `report` and `plot` show it. Client and servers share one machine, so the client must be cheap: requests
are put together from bytes, and a cell's own costs are told beside the servers'.
"""
