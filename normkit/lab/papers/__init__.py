"""One folder a paper: its recipes, printed tables and figures."""
