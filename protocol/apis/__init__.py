"""One module per API that is read or changed on its way; all others travel as opaque bytes."""
