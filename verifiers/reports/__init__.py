"""Reports of evaluations and training runs as self-contained HTML pages."""
