"""Which requests run before the server says it is ready, and when that is enough."""
