"""What several benchmarks share. Nothing here is run by itself."""
