"""The wire and the record formats: pure functions and state machines on bytes, no sockets, no clock.

Read in this order: `primitives`, `frame`, `header`, `schema`, `splice`, then one module per API in `apis`,
and `records` for what travels inside Fetch and Produce.
"""
