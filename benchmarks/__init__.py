"""What is measured: each benchmark runs as ``python -m benchmarks.NAME`` in the repository's directory."""
