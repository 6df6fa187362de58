"""Which releases of vLLM-Omni this package was tested with. Importing this needs no host."""

TESTED_RELEASES = ">=0.28.0,<0.31"
