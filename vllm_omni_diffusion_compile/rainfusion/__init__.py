"""Block-sparse attention over video: which rows may be left out, which key blocks stay, and what computes the rest."""
