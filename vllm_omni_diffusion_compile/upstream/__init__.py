"""The only code that knows vLLM-Omni: what is touched there (`ledger`), how (`graft`), and one adapter for each place."""
