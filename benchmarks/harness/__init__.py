"""What benchmarks share: data, baselines, timing, results files."""
