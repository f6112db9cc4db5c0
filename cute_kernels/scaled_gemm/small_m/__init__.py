"""The small-M product of low-precision floats on sm_90a."""
