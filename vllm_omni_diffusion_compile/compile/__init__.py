"""What is compiled, and what happens when that fails."""
