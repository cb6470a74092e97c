"""One module per API that the proxy reads or changes. Messages of all other APIs pass as opaque bytes."""
