"""The only code that knows vLLM-Omni: what is touched there (`ledger`), how (`graft`), an adapter for each place."""
