"""Programs that start ranks, each in its own way; `benchmarks.launching` times them."""
