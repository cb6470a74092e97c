"""The wire protocol and the record formats: pure functions and state machines on bytes, without sockets or a clock.

Read the modules in this order: `primitives`, `frame`, `header`, `schema`, `splice`. Then read `apis`, which has one
module per API, and `records`, which reads the record batches inside Fetch and Produce messages.
Internal to Tidegate.
"""
