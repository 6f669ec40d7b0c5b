"""Pure code over the ledger's rows: packing, merging and views; no I/O except through the port."""
